# SPDX-License-Identifier: BSD-3-Clause
"""Files of checkpoints: values that can be saved, damage, and what is replaced."""

from __future__ import annotations

import errno
import os
import random
import stat
import struct
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support.checkpoints import mark_as_folder

import torchfuse
from torchfuse.optimizers import FusedAdam


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "last.pt"


# --- Values ---------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    """A tensor that weights_only does not know."""


def with_attributes() -> torch.Tensor:
    value = torch.ones(2).as_subclass(Subclass)
    value.scale = 3  # type: ignore[attr-defined]
    return value


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(2, device="meta"), "to have values, got a tensor on the meta device"),
        (with_attributes(), r"to be a plain tensor, got Subclass with the attributes \['scale'\]"),
        (torch.nn.LazyLinear(3).weight, "to have a shape, got a lazy tensor"),
        ({2**70: 1}, "to have strings or 64-bit ints as keys, got 1180591620717411303424"),
        (nested(100), "to be nested at most 96 levels deep, got a deeper value"),
        (
            itself(),
            "to be nested at most 96 levels deep, got a deeper value or one that contains its",
        ),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(path: Path, bad: Any, message: str) -> None:
    expected = rf"save_checkpoint: expected the checkpoint\['values'\]\['x'\] {message}"
    with pytest.raises(ValueError, match=expected):
        torchfuse.save_checkpoint(path, values={"x": bad})
    assert not path.exists()


def test_what_the_values_are_is_checked(path: Path) -> None:
    with pytest.raises(TypeError, match="expected values to be a dict, got list"):
        torchfuse.save_checkpoint(path, values=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected values to have strings as keys, got 3"):
        torchfuse.save_checkpoint(path, values={3: 4})  # type: ignore[dict-item]
    numbers = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(
        ValueError, match=r"expected tensors that torch.save supports, got: Cannot s"
    ):
        torchfuse.save_checkpoint(path, values={"x": numbers, "y": torch.view_as_real(numbers)})
    assert not path.exists()


def test_tensors_are_saved_as_plain_ones_of_their_values(path: Path) -> None:
    conjugate = torch.tensor([1.0 + 2.0j]).conj()
    values = {
        "subclass": torch.ones(2).as_subclass(Subclass),
        "conjugate": conjugate,
        "negative": torch.tensor([1.0 + 2.0j]).conj().imag,
        "part": torch.zeros(10, dtype=torch.uint8)[:8].view(torch.int32),
    }
    torchfuse.save_checkpoint(path, values=values)
    found = torch.load(path)["values"]
    assert type(found["subclass"]) is torch.Tensor
    assert not found["conjugate"].is_conj()
    assert not found["negative"].is_neg()
    assert torch.equal(found["conjugate"], conjugate)
    assert found["negative"].tolist() == [-2.0]
    loaded = torchfuse.load_checkpoint(path)
    assert torch.equal(loaded["subclass"], torch.ones(2))
    assert loaded["part"].untyped_storage().nbytes() == 8


@pytest.mark.parametrize(
    "value",
    [
        nested(80),
        {-(2**63): 1},
        torch.zeros(2).to(torch.uint16),
        torch.zeros(3, 4)[3:, 4:],  # begins behind its memory
        torch.ones(4).to(torch.float8_e8m0fnu),
        torch.int4,
        torch.quint8,
    ],
    ids=str,
)
def test_what_is_saved_loads(path: Path, value: Any) -> None:
    torchfuse.save_checkpoint(path, values={"x": value})
    assert str(torchfuse.load_checkpoint(path)["x"]) == str(value)


def test_numbers_of_numpy_become_pythons(path: Path) -> None:
    np = pytest.importorskip("numpy")
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = FusedAdam([param], lr=0.1, ema_decay=np.float32(0.5))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(epoch / 10))
    param.grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    torchfuse.save_checkpoint(
        path, optimizer=optimizer, scheduler=scheduler, values={"epoch": np.int64(3)}
    )
    values = torchfuse.load_checkpoint(path, optimizer=optimizer, scheduler=scheduler)
    assert type(values["epoch"]) is int
    lr = optimizer.param_groups[0]["lr"]
    assert [type(number) for number in (lr, optimizer.ema_decay)] == [float, float]
    assert lr == 0.1 * np.cos(0.1)


# --- Damage ---------------------------------------------------------------------------------------


def test_flipped_bits_are_found(path: Path) -> None:
    values = {"numbers": torch.randn(5000), "text": "abc", "list": [1, 2.5]}
    # A program that saves other files without checksums.
    torch.serialization.set_crc32_options(False)
    try:
        torchfuse.save_checkpoint(path, values=values)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    whole = path.read_bytes()
    flips = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[flips.randrange(len(damaged))] ^= 1 << flips.randrange(8)
        path.write_bytes(damaged)
        try:
            assert str(torchfuse.load_checkpoint(path)) == str(values)
        except ValueError:
            refused += 1
    assert refused > 180  # not those between the records
    at = whole.index(values["numbers"].numpy().tobytes())  # type: ignore[attr-defined]
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(
        ValueError, match=r"to be intact, got a file with damaged bytes in '.*/data/0'"
    ):
        torchfuse.load_checkpoint(path)


def test_a_tensor_that_one_bit_says_is_a_folder_is_refused(path: Path) -> None:
    """torch.load leaves its memory without values, and compares no checksum of it."""
    torchfuse.save_checkpoint(path, values={"numbers": torch.ones(5000)})
    mark_as_folder(path, "data/0")
    with pytest.raises(
        ValueError, match=r"to be intact, got a file with damaged bytes in '.*/data/0'"
    ):
        torchfuse.load_checkpoint(path)


WHOLE: dict[str, Any] = {"torchfuse": {"format": 1}, "values": {}}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"torchfuse": {"format": 1}}, "to hold a dict as 'values', got NoneType"),
        ({"torchfuse": {"format": 1}, "values": [1]}, "to hold a dict as 'values', got list"),
        ({**WHOLE, 3: 4}, r"to hold 'model', got \[3, 'torchfuse', 'values'\]"),
        ({**WHOLE, "model": {3: 4}}, r"'model' to hold 'weight', got \[3\]"),
        (
            {**WHOLE, "torchfuse": {"format": torch.zeros(1).expand([6] * 12)}},
            r"of format 1, got a torch.float32 tensor of shape \[6",
        ),
        ({**WHOLE, "torchfuse": {"format": ["long" * 1000] * 1000}}, "to be of format 1, got"),
    ],
    ids=range(6),
)
def test_damaged_contents_are_named_and_not_shown_whole(
    path: Path, contents: Any, message: str
) -> None:
    torch.save(contents, path)
    with pytest.raises(ValueError, match=f"load_checkpoint: expected .*{message}") as error:
        torchfuse.load_checkpoint(path, model=torch.nn.Linear(1, 1))
    assert len(str(error.value)) < 500


# --- Files ----------------------------------------------------------------------------------------


def test_a_file_keeps_its_permissions(path: Path) -> None:
    for mode in (0o600, 0o664):
        path.touch()
        path.chmod(mode)
        torchfuse.save_checkpoint(path, values={"mode": mode})
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_what_is_not_a_file_is_neither_replaced_nor_read(tmp_path: Path, path: Path) -> None:
    os.mkfifo(path)
    (tmp_path / "link.pt").symlink_to("last.pt")
    for name in ("last.pt", "link.pt"):
        with pytest.raises(ValueError, match=f"expected .*{name} to be a file, got a pipe or dev"):
            torchfuse.save_checkpoint(tmp_path / name)
    with pytest.raises(ValueError, match="to be a file, got a pipe or device"):
        torchfuse.load_checkpoint(path)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "link.pt"]


def test_a_folder_that_cannot_be_read_is_no_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refusing(name: Any, flags: int, *rest: Any) -> int:
        if name == str(path.parent):
            raise PermissionError(13, "no")
        return opened(name, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    torchfuse.save_checkpoint(path, values={"number": 1})
    assert torchfuse.load_checkpoint(path) == {"number": 1}


# --- Files that expand ----------------------------------------------------------------------------


def write_pickle(path: Path, pickle: bytes) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle)
        file.writestr("archive/byteorder", b"little")
        file.writestr("archive/version", b"3\n")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


#: Each level holds the one before twice.
TUPLES = b")q\x00" + b"".join(bytes([104, k - 1, 0x86, 113, k]) for k in range(1, 90))
LISTS = b"]q\x00" + b"".join(
    bytes([93, 113, k, 40, 104, k - 1, 104, k - 1, 101]) for k in range(1, 90)
)


@pytest.mark.parametrize(
    ("dag", "key"), [(TUPLES, "format"), (b"(" + LISTS + b"t", "x")], ids=["tuples", "lists"]
)
def test_a_small_file_of_values_without_end_is_refused(path: Path, key: str, dag: bytes) -> None:
    inner = b"}" + text("torchfuse") + b"}" + text(key) + dag + b"ss"
    write_pickle(path, b"\x80\x02" + inner + b".")
    assert path.stat().st_size < 2000
    with pytest.raises(ValueError, match=r"last.pt to hold at most 1048576 values, got more from"):
        torchfuse.load_checkpoint(path)


def test_shared_values_come_back(path: Path) -> None:
    shared = [1, (2, 3)]
    values = {"twice": [shared, shared], "dtype": torch.float8_e5m2}
    torch.save({**WHOLE, "values": values}, path)
    assert torchfuse.load_checkpoint(path) == values


def test_compressed_files_are_refused_before_they_expand(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("archive/data/0", bytes(50_000_000))
    with pytest.raises(ValueError, match=r"it is compressed, which torch\.save does not do"):
        torchfuse.load_checkpoint(path)


def test_a_tuple_that_is_given_to_many_calls_counts_each_time(path: Path) -> None:
    size = b"ctorch\nSize\nq\x00"
    many = b"(" + b"N" * 20_000 + b"tq\x01\x85q\x02"
    write_pickle(path, b"\x80\x02" + size + many + b"0" + b"h\x00h\x02R0" * 9_000 + b"N.")
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=r"last\.pt to hold"):
        torchfuse.load_checkpoint(path)
    assert time.perf_counter() - begin < 5


def test_what_cannot_be_read_is_not_called_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchfuse.save_checkpoint(path)

    def broken(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(zipfile.ZipFile, "testzip", broken)
    with pytest.raises(OSError, match=r"load_checkpoint: could not read .*last.pt: Input/output"):
        torchfuse.load_checkpoint(path)


def test_threads_that_save_leave_torchs_switch_as_it_was(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        with ThreadPoolExecutor(4) as pool:
            saves = [
                pool.submit(torchfuse.save_checkpoint, path.with_suffix(f".{i}")) for i in range(40)
            ]
            for save in saves:
                save.result()
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
