// Where the blocks of the tree lie. Positions and widths in tokens, rows as counts; knows no pixels.

/**
 * A block for each node, and one for what was left out below a node or at the top.
 *
 * Every leaf takes a row, a node takes those of all below it.
 * Returns { blocks: [{ node | more, parent, level, x, tokens, row, rows, index, siblings }], rows, start, end }.
 */
export function layOut(document) {
  const children = new Map();
  const listed = new Set(document.nodes.map((node) => node.id));
  for (const node of document.nodes) {
    const parent = listed.has(node.parent) ? node.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  }
  const blocks = [];
  let end = 1;

  function place(nodes, more, parent, x, level, row) {
    const siblings = nodes.length + (more.nodes ? 1 : 0);
    const first = row;
    nodes.forEach((node, index) => {
      const block = { node, parent, level, x: node.depth_tokens, tokens: node.tokens, row, index, siblings };
      blocks.push(block);
      end = Math.max(end, block.x + block.tokens);
      const below = place(
        children.get(node.id) ?? [], node.more, node, block.x + block.tokens, level + 1, row,
      );
      block.rows = Math.max(1, below);
      row += block.rows;
    });
    if (more.nodes) {
      blocks.push({ more, parent, level, x, tokens: 0, row, rows: 1, index: nodes.length, siblings });
      row += 1;
    }
    return row - first;
  }

  const top = children.get(null) ?? [];
  const start = top.length ? Math.min(...top.map((node) => node.depth_tokens)) : 0;
  const rows = place(top, document.more, null, start, 1, 0);
  return { blocks, rows, start, end };
}
