from quire.base.ids import BlockId
from quire.contracts.block_keys import block_key, root_key
from quire.engine.scheduling.prefix_index import BlockContent, PrefixIndex


def chain(*blocks, root=""):
    """Return the contents of consecutive blocks, each a tuple of tokens."""
    contents, key = [], root_key(root)
    for tokens in blocks:
        key = block_key(key, tokens)
        contents.append(BlockContent(key, root, tokens))
    return contents


def publish(index, contents, first_block=0):
    parent = None
    for offset, content in enumerate(contents):
        parent = index.publish(parent, content, BlockId(first_block + offset))
        assert parent is not None
    return parent


def matched(index, contents):
    return [entry.block_id for entry in index.match(contents)]


def test_match_returns_the_longest_published_prefix():
    index = PrefixIndex()
    publish(index, chain((1, 2), (3, 4), (5, 6)))
    assert matched(index, chain((1, 2), (3, 4), (9, 9))) == [0, 1]
    assert matched(index, chain((1, 2), (9, 9), (5, 6))) == [0]
    assert matched(index, chain((3, 4))) == []


def test_first_publisher_wins_when_contents_are_equal():
    index = PrefixIndex()
    first = publish(index, chain((1, 2)), first_block=0)
    assert publish(index, chain((1, 2)), first_block=7) is first
    assert BlockId(7) not in index


def test_nothing_is_shared_when_roots_differ():
    index = PrefixIndex()
    publish(index, chain((1, 2), root="a"))
    assert matched(index, chain((1, 2), root="b")) == []
    assert matched(index, chain((1, 2), root="a")) == [0]


def test_dropped_block_is_not_found_and_hides_what_follows():
    index = PrefixIndex()
    contents = chain((1, 2), (3, 4))
    publish(index, contents)
    index.drop(BlockId(0))
    assert matched(index, contents) == []
    index.drop(BlockId(0))  # a block that is not published
    assert len(index) == 1


def test_hit_needs_equal_tokens_when_keys_collide():
    index = PrefixIndex()
    publish(index, [BlockContent(7, "", (1, 2))])
    assert matched(index, [BlockContent(7, "", (1, 3))]) == []
    assert index.publish(None, BlockContent(7, "", (1, 3)), BlockId(4)) is None
    assert matched(index, [BlockContent(7, "", (1, 2))]) == [0]


def test_hit_needs_equal_root_when_keys_collide():
    index = PrefixIndex()
    publish(index, [BlockContent(7, "a", (1, 2))])
    assert matched(index, [BlockContent(7, "b", (1, 2))]) == []


def test_hit_needs_the_same_parent_entry_when_keys_of_parents_collide():
    index = PrefixIndex()
    child = BlockContent(8, "", (3, 4))
    publish(index, [BlockContent(7, "", (1, 2)), child])
    index.drop(BlockId(0))
    publish(index, [BlockContent(7, "", (5, 6))], first_block=2)  # the same key, another prefix
    assert matched(index, [BlockContent(7, "", (5, 6)), child]) == [2]


def test_orphan_gives_way_when_its_content_is_published_again():
    index = PrefixIndex()
    contents = chain((1, 2), (3, 4))
    publish(index, contents)
    index.drop(BlockId(0))
    publish(index, contents, first_block=5)
    assert matched(index, contents) == [5, 6]
    assert BlockId(1) not in index


def test_own_orphan_is_published_anew_when_its_prefix_returns():
    index = PrefixIndex()
    contents = chain((1, 2), (3, 4))
    publish(index, contents)
    index.drop(BlockId(0))
    parent = publish(index, contents[:1], first_block=5)
    entry = index.publish(parent, contents[1], BlockId(1))
    assert entry is not None
    assert matched(index, contents) == [5, 1]
    assert len(index) == 2


def test_keys_are_the_same_in_every_process():
    assert root_key("") == 0xCAE66941D9EFBD404E4D88758EA67670
    assert block_key(0, (1, 2, 3)) == block_key(0, (1, 2, 3)) != block_key(1, (1, 2, 3))
