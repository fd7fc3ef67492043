"""A CUDA driver that only writes down its calls, for the real cuda-bindings.

The simulated device (`cudasim`) replaces cuda-bindings by a double. What the double cannot show is
whether the real package takes our arguments: it does here, and the driver is the double.
"""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("stub.c")


def build_stub(folder: Path) -> Path:
    """Compile `libcuda.so.1` into a folder, which then belongs on LD_LIBRARY_PATH.

    Raises CalledProcessError as the compiler fails.
    """
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library
