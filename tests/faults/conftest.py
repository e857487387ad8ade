"""One process with torch and FlashInfer imported, for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.support.pods import PodServer


@pytest.fixture(scope="session")
def pod_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodServer]:
    server = PodServer(tmp_path_factory.mktemp("workspace"))
    yield server
    server.close()
