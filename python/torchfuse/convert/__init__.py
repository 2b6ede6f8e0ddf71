# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of optimizers across languages and packages.

`read_cpp_archive` and `write_cpp_archive` move a run between the C++ and the Python classes,
`convert_checkpoint` does the same from file to file, and `to_apex_state_dict` hands a run over to
apex. Checkpoints of apex and torch.optim need no conversion: `load_state_dict` of our optimizers
takes them, and what `state_dict` returns loads into the optimizers of torch.optim.
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
