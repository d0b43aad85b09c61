"""The version number, defined only here: packages, ``mpic --version``, ``/health`` and the documentation read it.

A release raises it and names its section of CHANGELOG.md after it; CONTRIBUTING.md has the steps.
"""

VERSION = "0.2.0"
