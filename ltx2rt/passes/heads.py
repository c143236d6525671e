"""heads: attention in groups of heads, so that the heads of one group travel while another attends.

Requires a placed graph. Ensures the same inputs, outputs, parameters and values. Where heads are
split over devices in front of an attention and joined behind it (Ulysses), each of the two
exchanges becomes one for each group, with the same bytes in all. A repeat in which halves take
turns (`interleave`) stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

from ltx2rt.graph.ir import Graph, Node, Value, replace_repeats, rewrite
from ltx2rt.graph.trace import emit
from ltx2rt.graph.verify import verify

HEADS, GROUPS = "heads", "groups"
Exchanged = tuple[Node, Node, Node]  # what brings q, k and v, the attention, what takes its result


def group_heads(graph: Graph, groups: int) -> Graph:
    """`graph` with its attentions between exchanges split into `groups` groups of heads; itself if
    no attention's heads on a device divide by it."""

    def append(result: Graph, node: Node) -> bool:
        body = node.repeat.body
        found = _exchanged(body, groups)
        if found and not any(one.op == "barrier" for one in body.nodes):
            result.nodes.append(rewrite(node, lambda _: _grouped(body, found, groups)))
            return True
        return False

    result = replace_repeats(graph, append)
    return verify(result)


def is_grouped(graph: Graph) -> bool:
    """Whether some attention of `graph` is in groups of heads."""
    return any(GROUPS in v.type.axes for node, _ in graph.walk() for v in node.outputs)


def _exchanged(body: Graph, groups: int) -> list[Exchanged]:
    readers, kept = body.readers(), set(body.outputs.values())

    def only_reader(values: tuple[Value, ...]) -> Node | None:
        found = {node for v in values for node in readers.get(v, [])}
        return found.pop() if len(found) == 1 and kept.isdisjoint(values) else None

    found = []
    for sent in body.nodes:
        if sent.op != "all_to_all" or sent.inputs[0].type.axes[sent.attrs["split"]] != HEADS:
            continue
        attention = only_reader(sent.outputs)
        if attention is None or attention.op != "attention":
            continue
        others, back = attention.inputs[3:], only_reader(attention.outputs)
        if back is None or back.op != "all_to_all" or len(back.inputs) != 1:
            continue
        alike = attention.inputs[:3] == sent.outputs and not any(
            HEADS in v.type.axes for v in others
        )
        if alike and not any(v.type.size(HEADS) % groups for v in sent.outputs):
            found.append((sent, attention, back))
    return found


def _grouped(old: Graph, exchanged: list[Exchanged], groups: int) -> Graph:
    body = replace(old, nodes=[])
    sends = {sent: (attention, back) for sent, attention, back in exchanged}
    attends = {attention for _, attention, _ in exchanged}
    brought: dict[Node, list[Value]] = {}  # by what took it all
    for node in old.nodes:
        if node in sends:
            attention, back = sends[node]
            brought[back] = found = []
            for operands in zip(*(_cut(body, v, node, groups) for v in node.inputs), strict=True):
                came = emit(body, "all_to_all", *operands, **node.attrs)
                y = emit(body, attention.op, *came, *attention.inputs[3:], **attention.attrs)
                found += emit(body, "all_to_all", y, **back.attrs)
        elif node in brought:
            _join(body, brought[node], node)
        elif node not in attends:
            body.nodes.append(node)
    return body


def _cut(body: Graph, v: Value, sent: Node, groups: int) -> list[Value]:
    """Each device's heads in `groups` equal groups, by their order on the device."""
    parts = sent.attrs["parts"]
    sizes = {"parts": parts, GROUPS: groups, HEADS: v.type.size(HEADS) // (parts * groups)}
    apart = emit(body, "split", v, axis=HEADS, into=sizes)
    each = [emit(body, "at", apart, axis=GROUPS, index=i) for i in range(groups)]
    return [emit(body, "merge", x, axes=("parts", HEADS), into=HEADS) for x in each]


def _join(body: Graph, found: list[Value], back: Node) -> None:
    """The groups that `back` gave, as one."""
    parts = back.attrs["parts"]
    sizes = {"parts": parts, HEADS: found[0].type.size(HEADS) // parts}
    apart = [emit(body, "split", y, axis=HEADS, into=sizes) for y in found]
    y = emit(body, "stack", *apart, axis=GROUPS, dim=apart[0].type.axes.index(HEADS))
    emit(body, "merge", y, axes=("parts", GROUPS, HEADS), into=HEADS)
    body.nodes[-1] = replace(body.nodes[-1], outputs=back.outputs)
