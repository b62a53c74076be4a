"""`python -m goinfer_chat`: the same program as the console script `goinfer-chat`."""

from __future__ import annotations

import sys
from pathlib import Path

# `-m` puts the working folder first on sys.path, so a file there would be run in place of any module of ours, of the
# standard library or of a dependency. It stays only where it is the folder this package itself was found in.
if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parent.parent:
    del sys.path[0]

from goinfer_chat.start import main

if __name__ == "__main__":
    main()
