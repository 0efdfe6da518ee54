"""What a person names as data, found without torch and without touching them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.training.loading.folder import find_pictures
from planner.training.loading.items import FolderItems
from planner.training.loading.pictures import BadItemError
from planner.training.loading.sources import expand_shards, find_source
from tests.loading.made import encoded, folder_of, listing


def messages(root: Path) -> dict[str, str]:
    return {fault.item: fault.message for fault in find_source(str(root)).faults}


def test_a_folder_of_classes(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "data", 10)
    before = listing(root)
    source = find_source(str(root))
    assert (source.kind, source.num_items, source.num_classes) == ("folder", 10, 2)
    assert source.total_bytes == sum(path.stat().st_size for path in root.rglob("*.jpg"))
    assert source.faults == ()
    assert listing(root) == before


def test_they_are_those_of_torchvisions_image_folder(tmp_path: Path) -> None:
    from planner.libraries.missing_operators import declare_missing_operators

    declare_missing_operators()
    folders = pytest.importorskip("torchvision.datasets")
    root = folder_of(tmp_path / "data", 7, ("b", "a", "c"))
    (root / "a" / "deeper").mkdir()
    (root / "a" / "deeper" / "one.PNG").write_bytes(encoded("RGB", "PNG"))
    (root / "a" / "notes.txt").write_text("no picture")
    pictures = find_pictures(root)
    ours = {(str(root / pictures.name(i)), pictures.label(i)) for i in range(len(pictures))}
    assert ours == set(folders.ImageFolder(root).samples)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_what_has_no_end_is_no_picture(tmp_path: Path) -> None:
    """Nor does it become one by being named a picture, or being put there later."""
    root = folder_of(tmp_path / "data")
    os.mkfifo(root / "cat" / "pipe.jpg")
    (root / "dog" / "zero.png").symlink_to("/dev/zero")
    (root / "dog" / "gone.png").symlink_to("nowhere")
    assert {name for name in messages(root) if "no picture" in messages(root)[name]} == {
        "cat/pipe.jpg", "dog/zero.png",
    }  # fmt: skip
    items = FolderItems(find_pictures(root))
    path = root / items.name(0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadItemError, match="no regular file"):
        items.read(0)


def test_a_link_that_leads_back_ends(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "data")
    (root / "cat" / "again").symlink_to(root / "cat")
    (root / "dog" / "nowhere").symlink_to(root / "dog" / "nowhere")
    told = messages(root)
    assert "leads back to a folder above it" in told["cat/again"]
    assert find_source(str(root)).num_items == 16


SCAN = """
import os, sys
from planner.training.loading.sources import find_source
os.setuid(65534)
source = find_source(sys.argv[1])
print(source.num_items, source.faults[0].item, source.faults[0].message)
"""


def test_a_folder_without_rights_is_named(tmp_path: Path) -> None:
    """Root may read everything: the scan is then run as nobody."""
    root = folder_of(tmp_path / "data")
    for path in [root, *root.parents]:
        if path.is_relative_to(tmp_path.parents[1]):
            path.chmod(0o755)
    (root / "cat").chmod(0o000)
    if os.geteuid() == 0:
        ended = subprocess.run(
            [sys.executable, "-c", SCAN, str(root)], capture_output=True, text=True, check=False
        )
        said = ended.stdout or pytest.skip(f"nobody cannot run this: {ended.stderr[-200:]}")
    else:
        source = find_source(str(root))
        said = f"{source.num_items} {source.faults[0].item} {source.faults[0].message}\n"
    (root / "cat").chmod(0o755)
    assert said == "8 cat a folder that cannot be read: Permission denied\n"


def test_the_fingerprint_follows_the_data(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "data")
    first = find_source(str(root)).fingerprint
    assert find_source(str(root)).fingerprint == first
    (root / "cat" / "0000.jpg").write_bytes(encoded(side=40))
    changed = find_source(str(root)).fingerprint
    (root / "cat" / "0002.jpg").unlink()
    assert len({first, changed, find_source(str(root)).fingerprint}) == 3


def test_shards_by_folder_range_and_glob(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"train-{number:03d}.tar").write_bytes(b"x" * 10)
    assert find_source(str(tmp_path)).kind == "shards"
    assert find_source(f"{tmp_path}/train-{{000..001}}.tar").total_bytes == 20
    assert len(expand_shards(f"{tmp_path}/train-*.tar")) == 3


def test_a_factory_is_found_and_not_imported() -> None:
    source = find_source("tests.loading.exploding:make")
    assert source.kind == "factory"
    assert source.fingerprint
    assert "tests.loading.exploding" not in sys.modules
