"""Files are whole: the old one or the new one, and never a temporary one beside it."""

import os
import stat

import pytest

from deephoyer import files
from deephoyer.errors import UserError
from deephoyer.files import folder_at, write_atomically


def test_what_is_written_is_read_back(tmp_path):
    write_atomically(tmp_path / "a.bin", b"one")
    write_atomically(str(tmp_path / "a.bin"), b"two")
    assert (tmp_path / "a.bin").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_missing_folder_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.a\.bin: can't be written: No such file"):
        write_atomically(tmp_path / "nowhere" / "a.bin", b"x")


def test_a_folder_is_made_with_all_above_it_and_a_file_in_its_way_is_a_clear_error(tmp_path):
    assert folder_at(tmp_path / "a" / "b") == folder_at(tmp_path / "a" / "b") and (tmp_path / "a" / "b").is_dir()
    (tmp_path / "c").touch()
    with pytest.raises(UserError, match=r"c: can't be made: File exists"):
        folder_at(tmp_path / "c")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_atomically(tmp_path / "a.bin", b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(tmp_path / "a.bin", b"new")
    assert (tmp_path / "a.bin").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a.bin", b"new")
    assert os.listdir(tmp_path) == []


def test_a_folder_in_the_way_is_a_clear_error(tmp_path):
    (tmp_path / "a.bin").mkdir()
    with pytest.raises(UserError, match="can't be written"):
        write_atomically(tmp_path / "a.bin", b"x")
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one_and_what_it_points_to_is_written(there, tmp_path):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "file", tmp_path / "link"
    if there:
        target.write_bytes(b"old")
    link.symlink_to("real/file")
    write_atomically(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new" and [p.name for p in target.parent.iterdir()] == ["file"]


def test_others_may_read_the_result_as_the_umask_says(tmp_path):
    old = os.umask(0o022)
    try:
        write_atomically(tmp_path / "a.bin", b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o644
