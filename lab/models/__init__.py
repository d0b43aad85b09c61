"""``mpic models check``: tests with tiny random instances whether the native engine serves a family of models
correctly."""
