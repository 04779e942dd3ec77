// Lines and areas over the last minutes. Decoration: every chart has its words beside it.

import { SECONDS } from "./history.js";

const SVG = "http://www.w3.org/2000/svg";
const LONGEST_GAP = 6; // seconds without a reading, after which a line is broken

/** A path through [seconds ago, value]; nothing is drawn where readings or values are missing. */
export function linePath(points, width, height, most) {
  let path = "";
  let previous = null;
  for (const [age, value] of points) {
    if (value === null) {
      previous = null;
      continue;
    }
    const joins = previous !== null && previous - age <= LONGEST_GAP;
    path += `${joins ? "L" : "M"}${x(age, width)} ${y(value, height, most)}`;
    previous = age;
  }
  return path;
}

/** An area between two series that have the same ages. */
export function areaPath(lower, upper, width, height, most) {
  const pieces = [];
  let piece = [];
  for (let i = 0; i < upper.length; i += 1) {
    if (i > 0 && upper[i - 1][0] - upper[i][0] > LONGEST_GAP) {
      pieces.push(piece);
      piece = [];
    }
    piece.push(i);
  }
  pieces.push(piece);
  return pieces
    .filter((indices) => indices.length > 1)
    .map((indices) => {
      const along = indices.map((i) => point(upper[i], width, height, most));
      const back = indices.map((i) => point(lower[i], width, height, most)).reverse();
      return `M${along.join("L")}L${back.join("L")}Z`;
    })
    .join("");
}

function point([age, value], width, height, most) {
  return `${x(age, width)} ${y(value, height, most)}`;
}

function x(age, width) {
  return (width * (1 - age / SECONDS)).toFixed(1);
}

function y(value, height, most) {
  return (height * (1 - (most > 0 ? value / most : 0))).toFixed(1);
}

/** Make an SVG show these paths: [class, d] each. */
export function draw(svg, paths) {
  while (svg.childElementCount > paths.length) svg.lastElementChild.remove();
  while (svg.childElementCount < paths.length) svg.append(document.createElementNS(SVG, "path"));
  paths.forEach(([name, d], i) => {
    svg.children[i].setAttribute("class", name);
    svg.children[i].setAttribute("d", d);
  });
}

/** Columns of the whole pool from left to right: used at the bottom, cached on it. */
export function regionPaths({ num_blocks: size, used, cached }, numBlocks, height) {
  const width = 256 / used.length;
  const bars = (from, count) =>
    from
      .map((base, i) => {
        const full = Math.min(size, numBlocks - i * size);
        if (count[i] === 0) return "";
        const top = height * (1 - (base + count[i]) / full);
        const bottom = height * (1 - base / full);
        return `M${i * width} ${bottom}V${top}h${width}V${bottom}z`;
      })
      .join("");
  return [
    ["used", bars(used.map(() => 0), used)],
    ["cached", bars(used, cached)],
  ];
}
