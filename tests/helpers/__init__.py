"""What the tests share: backends to run on, and builders of the arguments they run with."""
