"""Arrays out of MATLAB files, which hold numbers and nothing that could run."""

from pathlib import Path
from typing import Any

from randombatch.data.graph import DataError
from randombatch.data.options import suggestion


def read_mat(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """The named variables: numpy arrays or scipy sparse matrices."""
    try:
        import scipy.io
    except ImportError:
        raise DataError(f"reading {path.name} needs scipy: pip install 'randombatch[train]'") from None
    try:
        found = scipy.io.loadmat(str(path), variable_names=keys)
    except NotImplementedError:
        raise DataError(f"{path} is a MATLAB 7.3 (HDF5) file: save it with -v7") from None
    except Exception as error:
        raise DataError(f"{path} is not a readable MATLAB file ({error}): fetch it again") from None
    missing = [key for key in keys if key not in found]
    if missing:
        names = [name for name, _, _ in scipy.io.whosmat(str(path))]
        raise DataError(
            f"{path} must hold {', '.join(keys)}; missing {', '.join(missing)}, found {', '.join(names) or 'nothing'}"
            f"{suggestion(missing[0], names)}"
        )
    for key in keys:
        if getattr(found[key], "dtype", None) is None or found[key].dtype.kind not in "biuf":
            raise DataError(
                f"`{key}` in {path} must hold numbers, got {getattr(found[key], 'dtype', 'something else')}"
            )
    return {key: found[key] for key in keys}


def whole32(matrix: Any) -> Any:
    """Ids that MATLAB keeps as doubles become integers; anything else is left for the checks to judge."""
    if matrix.dtype.kind == "f" and (matrix == matrix.round()).all() and abs(matrix).max(initial=0) < 2**31:
        return matrix.astype("int32")
    return matrix


def dense32(matrix: Any) -> Any:
    """A float32 array; a sparse matrix is converted before it is filled in, at half the memory."""
    matrix = matrix.astype("float32")
    return matrix.toarray() if hasattr(matrix, "toarray") else matrix
