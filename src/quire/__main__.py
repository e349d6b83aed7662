"""The module that `python -m quire` runs: the same as the command `quire`.

`python -m` puts the working directory first on sys.path; `quire` does not. This module removes it before any other
import, so that `cd MODEL && python -m quire serve .` imports no file of that model. Python has already searched that
directory for `quire` itself. Use `quire`, or `python -P -m quire`, in a folder that may have a module of that name.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
