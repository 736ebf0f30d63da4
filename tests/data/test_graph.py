"""The value that all sources deliver."""

import hashlib

import numpy as np
import torch

from randombatch import data
from randombatch.data.raw import Raw, build


def graph(**changes) -> data.Graph:
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]).bool()
    parts = {
        "name": "tiny",
        "x": torch.ones(4, 2),
        "edge_index": torch.tensor([[0, 1], [1, 0]]),
        "y": torch.tensor([0, 1, 0, 1]),
        "num_classes": 2,
        "train_mask": mask[:, 0],
        "val_mask": mask[:, 1],
        "test_mask": mask[:, 2],
    }
    return data.Graph(**{**parts, **changes})


def test_sizes_and_masks_of_two_dimensions() -> None:
    tiny = graph()
    assert (tiny.num_nodes, tiny.num_edges, tiny.num_features, tiny.num_splits) == (4, 2, 2, 1)
    assert tiny.train_mask.tolist() == [[True], [False], [False], [True]]


def test_split_hash_is_a_fixed_function_of_the_masks() -> None:
    expected = hashlib.sha256(b"4 1" + bytes([0b1001, 0b0010, 0b0100])).hexdigest()[:16]
    assert graph().split_hash() == expected
    assert graph(x=torch.zeros(4, 7), name="other").split_hash() == expected
    changed = graph(test_mask=torch.tensor([False, False, True, True]))
    assert changed.split_hash() != expected
    # The same bits in another order of splits and nodes are another split.
    wide = torch.eye(4).bool()
    assert (
        graph(train_mask=wide, val_mask=wide, test_mask=wide).split_hash()
        != graph(train_mask=wide.flip(1), val_mask=wide, test_mask=wide).split_hash()
    )


def test_errors_are_one_line() -> None:
    assert str(data.DataError("two\n lines")) == "two lines"
    assert isinstance(data.DataError("x"), ValueError)


def raw(**changes) -> Raw:
    masks = np.eye(3, dtype=bool).repeat(2, 1)
    parts = {
        "name": "tiny",
        "x": np.array([[1.0, -3.0], [0.0, 0.0], [2.0, 2.0], [1.0, 0.0], [0.5, 0.0], [0.0, -4.0]]),
        "edge_index": np.array([[0, 1], [1, 0]]),
        "y": np.array([0, 1, 0, 1, 0, 1]),
        "masks": list(masks),
    }
    return Raw(**{**parts, **changes})


def test_row_normalisation_keeps_rows_of_zeros() -> None:
    rows = build(raw(), feature_norm="row").x
    assert rows.dtype == torch.float32
    assert rows.tolist() == [[0.25, -0.75], [0, 0], [0.5, 0.5], [1, 0], [1, 0], [0, -1]]
    assert build(raw()).x[0].tolist() == [1, -3]


def test_one_mask_for_all_splits() -> None:
    wide = np.eye(3, dtype=bool).repeat(2, 1)
    built = build(raw(masks=[wide[0][:, None].repeat(4, 1), wide[1], wide[2][:, None]]))
    assert built.num_splits == 4
    assert torch.equal(built.val_mask, torch.from_numpy(wide[1])[:, None].expand(-1, 4))


def test_arrays_of_odd_layout_are_understood() -> None:
    plain = build(raw())
    odd = build(
        raw(
            x=np.asfortranarray(raw().x.astype(">f8")),
            y=raw().y.astype(np.uint16)[:, None],
            edge_index=raw().edge_index.astype(np.uint32),
            masks=[mask.astype(np.int8) for mask in raw().masks],
        )
    )
    assert torch.equal(plain.x, odd.x)
    assert torch.equal(plain.y, odd.y)
    assert torch.equal(plain.edge_index, odd.edge_index)
    assert plain.split_hash() == odd.split_hash()


def test_read_only_arrays_are_not_shared() -> None:
    x = raw().x.astype(np.float32)
    x.setflags(write=False)
    built = build(raw(x=x))
    built.x[0, 0] = 9
    assert x[0, 0] == 1
