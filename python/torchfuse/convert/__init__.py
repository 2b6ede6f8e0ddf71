# SPDX-License-Identifier: BSD-3-Clause
"""Converts checkpoints of optimizers and schedulers between Python, C++ and apex.

`read_cpp_archive` and `write_cpp_archive` convert between state dicts and archives of the C++
optimizers, `read_cpp_scheduler` and `write_cpp_scheduler` do so for schedulers, and
`read_sharded_checkpoint` and `write_sharded_checkpoint` for folders with a file for each rank.
`convert_checkpoint` and `convert_sharded_checkpoint` convert what lies on disk, and
`to_apex_state_dict` returns a state dict for apex. Checkpoints of apex and torch.optim need no
conversion: `load_state_dict` of torchfuse's optimizers accepts them, and torch.optim's optimizers
load what `state_dict` returns.
"""

from torchfuse.convert._apex import to_apex_state_dict
from torchfuse.convert._files import Conversion, convert_checkpoint
from torchfuse.convert._folders import convert_sharded_checkpoint
from torchfuse.convert._from_cpp import read_cpp_archive
from torchfuse.convert._schedulers import read_cpp_scheduler, write_cpp_scheduler
from torchfuse.convert._sharded import read_sharded_checkpoint
from torchfuse.convert._sharded_writer import write_sharded_checkpoint
from torchfuse.convert._to_cpp import write_cpp_archive

__all__ = [
    "Conversion",
    "convert_checkpoint",
    "convert_sharded_checkpoint",
    "read_cpp_archive",
    "read_cpp_scheduler",
    "read_sharded_checkpoint",
    "to_apex_state_dict",
    "write_cpp_archive",
    "write_cpp_scheduler",
    "write_sharded_checkpoint",
]
