"""Demo models, sample images and documents, evaluation sets (`mpic.data`)."""

DEFAULT = "large"
"""The bundled model that is served when none is named. Another one becomes the default by this line: everything asks
for it here (docs/demo-model.md, "When there are new weights")."""
