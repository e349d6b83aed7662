"""`python -m quire` is `quire`.

`python -m` puts the working directory first on sys.path; `quire` does not. The working directory is taken away here,
before anything else is imported, so that `cd MODEL && python -m quire serve .` imports no file of that model. Python itself has
looked for `quire` in it by then: use `quire`, or `python -P -m quire`, where a folder may hold a module of that name.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
