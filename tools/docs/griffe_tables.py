"""An extension of griffe for the site: column tables in docstrings become lists, which Markdown can show."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from griffe import Extension, Object

_spec = importlib.util.spec_from_file_location("field_tables", Path(__file__).with_name("field_tables.py"))
if _spec is None or _spec.loader is None:
    raise ImportError("field_tables.py is missing next to griffe_tables.py")
_field_tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_field_tables)


class FieldTables(Extension):
    """Rewrites every docstring once, when its object has been read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Replace the docstring's text."""
        if obj.docstring is not None:
            obj.docstring.value = _field_tables.to_markdown(obj.docstring.value)
