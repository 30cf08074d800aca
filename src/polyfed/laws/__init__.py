"""The laws: what every method must keep, as checks that run on any method, also on a user's own.

`python -m polyfed.laws mine:FedDyn` tries a method on all of them and prints a line for each. `federation` makes the
small federation of the trial, `checks` has a function for each law, and `replies` bends the replies of one client. The
tests of polyfed run the same checks on every built-in method.
"""

from polyfed.laws.checks import LAWS, Broken, Law, NotApplicable
from polyfed.laws.federation import Row, Trial

__all__ = ["LAWS", "Broken", "Law", "NotApplicable", "Row", "Trial"]
