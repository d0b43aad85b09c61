"""The policies: one file per family, which names its paper and section."""
