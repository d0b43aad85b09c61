"""The GPU report: checks and measurements of a GPU, section by section, on a bare machine.

``tools/gpu_report.py`` starts it. ``supervise``, ``record`` and ``sections`` need only the standard library; each
section runs in a separate process and imports the modules that it measures.
"""
