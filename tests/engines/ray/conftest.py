"""One Ray on this machine for the tests of this folder, which `tox -e deep -- ray` installs."""

import os
import sys
from collections.abc import Iterator

import pytest
from helpers.paths import ROOT

EXAMPLE = str(ROOT / "examples" / "ray_serve")
OBJECT_STORE = 200 << 20


@pytest.fixture(scope="session")
def _ray() -> Iterator[None]:
    """Ray with Serve; its processes are ended in any case."""
    reason = "Ray is not installed: `tox -e deep -- ray` installs it"
    ray = pytest.importorskip("ray", reason=reason)
    serve = pytest.importorskip("ray.serve", reason=reason)
    sys.path.append(EXAMPLE)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path]))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        serve.start(http_options={"location": "NoServer"})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        sys.path.remove(EXAMPLE)
