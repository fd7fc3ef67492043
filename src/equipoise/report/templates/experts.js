// Draws rows by layer and expert, one pixel a cell, and says what is in the cell that is pointed at.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("experts"), cell = document.getElementById("cell");
  const frame = canvas.nextElementSibling;
  const layers = data.rows.length, experts = data.rows[0].length;
  const sums = data.rows.map((row) => row.reduce((sum, rows) => sum + rows, 0));
  const load = (layer, expert) =>
    sums[layer] ? (data.rows[layer][expert] * experts) / sums[layer] : 0;
  const channels = data.colours.map((text) =>
    [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  const colour = (value) => {
    const place = Math.min(value / data.top, 1) * (channels.length - 1);
    const first = Math.min(Math.floor(place), channels.length - 2), part = place - first;
    return channels[first].map((from, k) => from + (channels[first + 1][k] - from) * part);
  };

  canvas.width = experts;
  canvas.height = layers;
  canvas.style.height = Math.max(160, Math.min(layers * 9, 560)) + "px";
  const context = canvas.getContext("2d"), image = context.createImageData(experts, layers);
  for (let at = 0; at < layers * experts; at++)
    image.data.set([...colour(load(Math.floor(at / experts), at % experts)), 255], at * 4);
  context.putImageData(image, 0, 0);
  document.querySelector(".scale i").style.background =
    "linear-gradient(90deg," + data.colours.join(",") + ")";
  document.getElementById("top").textContent =
    data.top.toFixed(1) + " times the mean expert of the layer, or more";

  const show = (layer, expert) => {
    const rows = data.rows[layer][expert], copies = [];
    data.placement[layer].forEach((held, slot) => {
      if (held === expert)
        copies.push("rank " + Math.floor(slot / data.slotsPerRank)
          + " (" + data.shares[layer][slot] + " %)");
    });
    cell.textContent = "Layer " + data.layers[layer] + ", expert " + expert + ": "
      + rows.toLocaleString("en") + " rows, "
      + (sums[layer] ? (100 * rows) / sums[layer] : 0).toFixed(2) + " % of the layer, "
      + load(layer, expert).toFixed(2) + " times the mean. "
      + (copies.length === 1 ? "1 copy: " : copies.length + " copies: ") + copies.join(", ") + ".";
    const wide = canvas.clientWidth / experts, high = canvas.clientHeight / layers;
    Object.assign(frame.style, {
      display: "block", left: expert * wide - 2 + "px", top: layer * high - 2 + "px",
      width: wide + 4 + "px", height: high + 4 + "px",
    });
  };

  let at = [0, 0];
  const move = (layer, expert) => {
    at = [Math.max(0, Math.min(layer, layers - 1)), Math.max(0, Math.min(expert, experts - 1))];
    show(...at);
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    move(Math.floor(((event.clientY - box.top) / box.height) * layers),
      Math.floor(((event.clientX - box.left) / box.width) * experts));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in step)) return;
    event.preventDefault();
    move(at[0] + step[event.key][0], at[1] + step[event.key][1]);
  });
})();
