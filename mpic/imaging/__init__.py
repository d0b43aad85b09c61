"""Decodes untrusted images in bounded memory and time; large images are decoded in separate processes.

``image_header`` reads the size from a file's first bytes. ``pixels`` decodes; it imports Pillow and nothing heavy, as
does this module, so that a worker starts quickly and stays small. ``worker`` runs in a decoding process and
``worker_pool`` starts these. ``budget`` bounds how much is decoded at a time, and ``decoder`` is the entry point.
"""
