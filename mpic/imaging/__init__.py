"""Decoding of images that anybody may send: in bounded memory and time, large ones in processes of their own.

``claims`` reads from a file's first bytes what it claims to be, ``pixels`` decodes (it imports Pillow and nothing
heavy, so that a worker starts quickly and stays small; so does this module), ``worker`` and ``processes`` run it
elsewhere, ``budget`` says when, and ``decoder`` is what others call.
"""
