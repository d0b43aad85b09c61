"""``mpic calibrate``: what reuse costs the answers of a model, for the policy ``auto`` (``mpic.server.auto``)."""
