"""Decodes untrusted images, clips and documents in bounded memory and time, in separate processes unless they are small
images.

``image_header`` reads the size from a file's first bytes. ``pixels`` decodes; it imports Pillow and nothing heavy, as
does this module, so that a worker starts quickly and stays small. ``worker`` runs in a decoding process and
``worker_pool`` starts these. ``budget`` bounds how much is decoded at a time, and ``decoder`` is the entry point.
``clips`` and ``documents`` import what reads these, in a worker only.
"""
