"""Demo models, sample images and documents, evaluation sets (`mpic.data`)."""
