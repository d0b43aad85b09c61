"""One small file a policy family, each with its paper and section."""
