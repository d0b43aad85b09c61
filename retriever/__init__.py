"""Retrieval of references (the *dynamic library* of MPIC, section 4.2): finds references by text or image through their
vectors.

::

    retriever = Retriever(library, Embedder(folder))
    for hit in retriever.search(Query(text="picture with a red circle"), top_k=3):
        print(hit.score, hit.reference.title)
"""

from mpic.retriever.embedder import Embedder, EmbedderName
from mpic.retriever.retriever import Query, Retriever, SearchHit

__all__ = ["Embedder", "EmbedderName", "Query", "Retriever", "SearchHit"]
