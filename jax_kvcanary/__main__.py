"""``python -m jax_kvcanary``: see :mod:`jax_kvcanary.cli`."""

import sys

from jax_kvcanary.cli import main

if __name__ == "__main__":
    sys.exit(main())
