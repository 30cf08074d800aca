"""The certificate of a run: one signed file that says what was run, what left whom, and what it cost of privacy.

- `issue`: computes the content from the folder of a run, and signs it. `polyfed certify` calls it.
- `verification`: checks a certificate with public keys, and compares it with the run's files and devices' logs.
- `answers`: what left a client in a time, from an audit log or a proof. `polyfed audit-log show` calls it.
- `crate`: describes the folder as a Research Object Crate.
"""

from polyfed.experiment.certificate.crate import write_crate
from polyfed.experiment.certificate.issue import certify
from polyfed.experiment.certificate.verification import Verification, verify_certificate

__all__ = ["Verification", "certify", "verify_certificate", "write_crate"]
