"""`python -m moeserve` and the console script: the layout guard, then the command line.

The command line lives in `launch`, the outermost package, which nothing imports: it is looked up
by name here, as `python -m launch.cli` would.
"""

from __future__ import annotations

import importlib
import sys

from moeserve.layout import ShadowedPackage, check_layout


def main() -> None:
    try:
        check_layout()
    except ShadowedPackage as error:
        print(f"moeserve: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    importlib.import_module("launch.cli").main()


if __name__ == "__main__":
    main()
