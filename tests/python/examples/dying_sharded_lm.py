# SPDX-License-Identifier: BSD-3-Clause
"""Runs sharded_lm.py, and kills a process of it in each attempt that has a death.

    torchrun --max-restarts 2 ... dying_sharded_lm.py step:5,save:6 <options of sharded_lm.py>

In the first attempt here, rank 1 dies when it asks for the batch of step 5; in the second, rank 0
dies in the checkpoint after step 6, whose parts are all written. The third has no death. "stop:5"
stops rank 1 in step 5 until it is killed. Rank 1 appends the steps whose batches it asks for to the
file "batches" in the folder that it runs in.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "python"))
import sharded_lm
import sharded_lm_data

DEATHS = {"step": signal.SIGKILL, "stop": signal.SIGSTOP}
RANK = int(os.environ["RANK"])


def main() -> None:
    """Arms the death of this attempt, and trains."""
    deaths = sys.argv.pop(1).split(",")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    where, step = (deaths[attempt] if attempt < len(deaths) else "never:0").split(":")

    class Corpus(sharded_lm_data.Corpus):
        def batch(self, number: int, samples: int) -> tuple[Tensor, Tensor]:
            if RANK == 1:
                with Path("batches").open("a", encoding="utf-8") as file:
                    file.write(f"{number}\n")
                if number == int(step) and where in DEATHS:
                    os.kill(os.getpid(), DEATHS[where])
            return super().batch(number, samples)

    class Writer(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            if (where, int(step)) == ("save", int(Path(self.path).name)):
                os.kill(os.getpid(), signal.SIGKILL)
            super().finish(metadata, results)

    def dying_save(state: dict[str, Any], checkpoint_id: Path, no_dist: bool) -> None:
        save(state, storage_writer=Writer(checkpoint_id), no_dist=no_dist)

    with patch.multiple(sharded_lm, Corpus=Corpus, save=dying_save):
        sharded_lm.main()


if __name__ == "__main__":
    main()
