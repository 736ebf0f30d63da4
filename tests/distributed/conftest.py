"""The fixture `ranks`: functions run as ranks of a gloo group."""

from collections.abc import Iterator

import pytest
from rank_pool import Pool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(str(tmp_path_factory.mktemp("ranks")))
    yield pool
    pool.stop()
