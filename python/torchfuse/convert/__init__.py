# SPDX-License-Identifier: BSD-3-Clause
"""Converts optimizer checkpoints between Python, C++ and apex.

`read_cpp_archive` and `write_cpp_archive` convert between state dicts and archives of the C++
classes, `convert_checkpoint` does so from file to file, and `to_apex_state_dict` returns a state
dict for apex. Checkpoints of apex and torch.optim need no conversion: `load_state_dict` of
torchfuse's optimizers accepts them, and torch.optim's optimizers load what `state_dict` returns.
"""

from torchfuse.convert._apex import to_apex_state_dict
from torchfuse.convert._files import Conversion, convert_checkpoint
from torchfuse.convert._from_cpp import read_cpp_archive
from torchfuse.convert._to_cpp import write_cpp_archive

__all__ = [
    "Conversion",
    "convert_checkpoint",
    "read_cpp_archive",
    "to_apex_state_dict",
    "write_cpp_archive",
]
