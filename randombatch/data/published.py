"""Published graphs that are one `.npz` each: heterophilous ones (Platonov et al.), Amazon and Coauthor (Shchur et al.).

The same files that PyTorch Geometric downloads, read without unpickling anything. chameleon and squirrel are the
filtered versions (890 and 2,223 nodes); actor has the ten splits of Geom-GCN.
"""

from pathlib import Path

from randombatch.data import npz
from randombatch.data.files import fetch, find
from randombatch.data.raw import Raw

_PLATONOV = (
    "https://raw.githubusercontent.com/yandex-research/heterophilous-graphs/"
    "a431395582e929d88271309716bea4fe24ce6318/data/"
)
_SHCHUR = "https://github.com/shchur/gnn-benchmark/raw/master/data/npz/"

URLS = {
    "actor": f"{_PLATONOV}actor.npz",
    "amazon-computers": f"{_SHCHUR}amazon_electronics_computers.npz",
    "amazon-photo": f"{_SHCHUR}amazon_electronics_photo.npz",
    "amazon-ratings": f"{_PLATONOV}amazon_ratings.npz",
    "chameleon": f"{_PLATONOV}chameleon_filtered.npz",
    "coauthor-cs": f"{_SHCHUR}ms_academic_cs.npz",
    "coauthor-physics": f"{_SHCHUR}ms_academic_phy.npz",
    "minesweeper": f"{_PLATONOV}minesweeper.npz",
    "questions": f"{_PLATONOV}questions.npz",
    "roman-empire": f"{_PLATONOV}roman_empire.npz",
    "squirrel": f"{_PLATONOV}squirrel_filtered.npz",
    "tolokers": f"{_PLATONOV}tolokers.npz",
}
NAMES = tuple(URLS)


def read(name: str, root: Path) -> Raw:
    """From `root`, where the file lies directly or in the folders that PyTorch Geometric makes; else downloaded."""
    file = URLS[name].rsplit("/", 1)[1]
    folder = name.replace("-", "_")
    path = find(root, (file, f"{name}/{file}", f"{folder}/raw/{file}", f"{name}/raw/{file}"))
    return npz.read(path or fetch(URLS[name], root / file), name)
