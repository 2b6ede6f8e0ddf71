# SPDX-License-Identifier: BSD-3-Clause
"""What the classes' documentation says of arguments and defaults is so."""

from __future__ import annotations

import inspect
import re
from typing import Any

from support.adam import make_params
from test_apex_defects import EVERY_OPTIMIZER

from torchfuse.testing import OptimSpec


def documented_arguments(kind: type) -> dict[str, str]:
    """What a class says about each argument of its constructor."""
    flags = re.DOTALL | re.MULTILINE
    section = re.search(r"^Args:\n(.*?)^\S", f"{inspect.getdoc(kind)}\nend", flags)
    assert section is not None, f"{kind.__name__} documents no arguments"
    entries = re.findall(r"^    (\*{0,2}\w+): (.*?)(?=^    \S|\Z)", section[1], flags)
    return {name: " ".join(text.split()) for name, text in entries}


def wrong_defaults(kind: type) -> list[str]:
    """Arguments whose documentation names another default than the signature has."""
    documented = documented_arguments(kind)
    wrong = []
    for parameter in inspect.signature(kind).parameters.values():
        named = re.search(r"\bdefault(?: is|:) ([\w.-]*\w)", documented.get(parameter.name, ""))
        is_number = isinstance(parameter.default, float)
        default = f"{parameter.default:g}" if is_number else str(parameter.default)
        if named is not None and named[1] != default:
            wrong.append(parameter.name)
    return wrong


@EVERY_OPTIMIZER
def test_the_documentation_and_the_code_agree_about_arguments_and_defaults(spec: OptimSpec) -> None:
    kind: Any = spec.optimizer
    signature = inspect.signature(kind).parameters.values()
    names = [f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in signature]
    assert names == list(documented_arguments(kind))
    assert not wrong_defaults(kind)
    group = kind(make_params(), lr=1e-3).param_groups[0]
    for parameter in signature:
        if parameter.name in group and parameter.name not in ("params", "lr"):
            # None: what the class leaves in gradients.
            default = False if parameter.name == "write_back_grads" else parameter.default
            assert group[parameter.name] == default, parameter.name


def test_a_documented_default_of_another_time_is_seen() -> None:
    class Outdated:
        """One of apex's.

        Args:
            lr: learning rate, with a text
                of two lines (default: 0.001)
            eps: added to the denominator. The default is 1e-8.
        """

        def __init__(self, lr: float = 1e-3, eps: float = 1e-6) -> None: ...

    assert wrong_defaults(Outdated) == ["eps"]
