"""``python -m jax_kvcanary <command>``."""

import sys

from jax_kvcanary.cli import main

sys.exit(main())
