"""What the sources of the kernels must not do although the interpreter takes it: read here, not run."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SOURCES = [*sorted((ROOT / "quire/kernels/triton").glob("*.py")), *sorted(Path(__file__).parent.glob("*.py"))]
OF_TENSORS = {"to", "dtype", "shape", "type", "cast", "trans", "reshape", "broadcast_to"}


class Function:
    """A function under triton.jit: which parameters are specialised where they are 1, and where each name goes."""

    def __init__(self, node, decorator):
        self.node = node
        self.parameters = [arg.arg for arg in node.args.args]
        constants = {arg.arg for arg in node.args.args if "constexpr" in ast.dump(arg.annotation or ast.Constant(None))}
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
        plain = {name for key in keywords if key.arg == "do_not_specialize" for name in ast.literal_eval(key.value)}
        self.numbers = {name for name in self.parameters if not name.endswith("_ptr")} - constants - plain

    def with_copies(self, names):
        """Return names, and those that are assigned from nothing but them and literals."""
        found = set(names)
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and is_made_of(node.value, found):
                found.add(node.targets[0].id)
        return found

    def calls(self):
        """Yield (name of what is called, its arguments by position or name)."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                yield name, dict(enumerate(node.args)) | {key.arg: key.value for key in node.keywords}

    def misuses(self, names):
        """Yield the lines where a name is used as only a tensor can be."""
        for node in ast.walk(self.node):
            is_number = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
            if is_number and node.attr in OF_TENSORS:
                yield f"{self.node.name}, line {node.lineno}: {ast.unparse(node)}"


def is_made_of(node, names):
    """Whether an expression is made of names and literals alone, so that it is a constant where these are."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.BinOp):
        parts = node.left, node.right
        return any(is_made_of(part, names) for part in parts) and all(
            is_made_of(part, names) or isinstance(part, ast.Constant) for part in parts
        )
    return False


def functions_of(sources):
    found = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if ast.unparse(decorator).startswith("triton.jit"):
                        found[node.name] = Function(node, decorator)
    return found


def numbers_used_as_tensors(sources):
    """Return the places where a number that a launch passes is used as a tensor: as 1 it is a constant, which has no `.to`."""
    functions = functions_of(sources)
    called = {name for function in functions.values() for name, _ in function.calls()}
    numbers = {name: function.numbers if name not in called else set() for name, function in functions.items()}
    while True:  # numbers that kernels pass on, until nothing is added
        before = {name: set(found) for name, found in numbers.items()}
        for name, function in functions.items():
            numbers[name] = function.with_copies(numbers[name])
            for callee, arguments in function.calls():
                for key, value in arguments.items() if callee in functions else ():
                    if is_made_of(value, numbers[name]):
                        parameters = functions[callee].parameters
                        numbers[callee] = numbers[callee] | {parameters[key] if isinstance(key, int) else key}
        if numbers == before:
            return [line for name, function in functions.items() for line in function.misuses(numbers[name])]


def test_no_number_that_may_be_one_is_used_as_a_tensor():
    sources = [path.read_text() for path in SOURCES]
    assert {"attend_runs", "write_noise"} <= functions_of(sources).keys()
    assert numbers_used_as_tensors(sources) == []


HELPER = "@triton.jit\ndef narrow(value, BLOCK: tl.constexpr):\n    return value.to(tl.uint32)\n"


@pytest.mark.parametrize(
    "source, num_found",
    [
        ("@triton.jit\ndef f(x_ptr, count):\n    return count.to(tl.int64)\n", 1),
        ("@triton.jit(do_not_specialize=['count'])\ndef f(x_ptr, count):\n    return count.to(tl.int64)\n", 0),
        ("@triton.jit\ndef f(x_ptr, count):\n    more = count * 2\n    return more.to(tl.int64)\n", 1),
        ("@triton.jit\ndef f(x_ptr, count):\n    more = tl.load(x_ptr) + count\n    return more.to(tl.int64)\n", 0),
        (HELPER + "@triton.jit\ndef f(x_ptr, count):\n    return narrow(count, 4)\n", 1),
        (HELPER + "@triton.jit\ndef f(x_ptr, count):\n    return narrow(value=count, BLOCK=4)\n", 1),
        (HELPER + "@triton.jit\ndef f(x_ptr, count):\n    return narrow(tl.load(x_ptr), count)\n", 0),
    ],
    ids=["used", "not specialised", "a copy", "a tensor", "passed on", "passed by name", "something else"],
)
def test_numbers_that_are_used_as_tensors_are_found(source, num_found):
    assert len(numbers_used_as_tensors([source])) == num_found
