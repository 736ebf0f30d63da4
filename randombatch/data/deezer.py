"""deezer-europe from `deezer-europe.mat` (Lim et al.): 28,281 users, 31,241 binary features, two classes.

Protocol of SGFormer: random 50/25/25 splits, one per run, and accuracy (its code calls `eval_acc` for this graph
although a comment says ROC-AUC), the default here too. Features take 3.5 GB when dense.
"""

from pathlib import Path

import numpy as np

from randombatch.data.files import fetch, find
from randombatch.data.mat import dense32, read_mat
from randombatch.data.raw import Raw

NAMES = ("deezer-europe",)
URL = "https://github.com/CUAI/Non-Homophily-Large-Scale/raw/master/data/deezer-europe.mat"


def read(name: str, root: Path) -> Raw:
    """From `root`, else downloaded. The links are a sparse matrix `A`, both directions stored."""
    file = "deezer-europe.mat"
    path = find(root, (file, f"deezer/{file}", f"{name}/{file}", f"{name}/raw/{file}")) or fetch(URL, root / file)
    arrays = read_mat(path, ("A", "label", "features"))
    edge_index = np.stack(arrays["A"].nonzero())
    return Raw(name=name, x=dense32(arrays["features"]), edge_index=edge_index, y=arrays["label"].reshape(-1))
