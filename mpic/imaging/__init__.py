"""Decodes untrusted images, clips and documents in bounded memory and time, in separate processes unless they are small
images.

``image_header`` reads the size from a file's first bytes. ``pixels`` decodes; like this module it imports Pillow and
nothing heavy, so that a worker starts quickly and stays small. ``worker`` runs in a decoding process and
``worker_pool`` starts these. ``budget`` bounds how much is decoded at a time, and ``decoder`` is the entry point.
``clips`` and ``documents`` import their reader libraries, only inside a worker.
"""
