"""The rewriting of a template's syntax tree that makes its loops, comparisons and texts go through a counter.

The rewritten tree calls the filters "quire count", "quire charge" and "quire slice" of the environment; a template cannot
spell their names, as they contain a space, and they change no value.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

_FILE_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


def rewrite(tree: nodes.Template, characters_per_unit: int) -> nodes.Template:
    """Change the tree in place and return it. Raises TemplateSyntaxError where it wants to open another template."""
    for node in tree.find_all(_FILE_NODES):
        kind = type(node).__name__.lower()
        raise TemplateSyntaxError(f"a chat template must not open files, got {{% {kind} %}}", node.lineno)
    _Counting(characters_per_unit).visit(tree)
    return tree


class _Counting(NodeTransformer):
    def __init__(self, characters_per_unit: int) -> None:
        self._characters_per_unit = characters_per_unit

    def visit_For(self, node: nodes.For) -> nodes.For:
        num_characters = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        weight = nodes.Const(1 + num_characters // self._characters_per_unit, lineno=node.lineno)
        node.iter = _filter("quire count", node.iter, [weight])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [_charge(operand) for operand in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _charge(node.expr)
        for operand in node.ops:
            operand.expr = _charge(operand.expr)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Dict:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _charge(pair.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        none = nodes.Const(None, lineno=node.lineno)
        bounds = [part or none for part in (node.arg.start, node.arg.stop, node.arg.step)]
        return _filter("quire slice", node.node, bounds)


def _charge(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter("quire charge", node, [])


def _filter(name: str, node: nodes.Expr, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(node, name, args, [], None, None, lineno=node.lineno)
