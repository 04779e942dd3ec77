// What is drawn from the metrics: what the server is, the pool over time, slots, totals.

import { areaPath, draw } from "./charts.js";
import { byId, count, element, percent, plural, setRows, setText } from "./elements.js";
import { SECONDS } from "./history.js";
import { bucketsOf, labelsOf, valueOf } from "./prometheus.js";

const REASONS = ["stop", "length", "abort", "error"];

/** One reading of /metrics at `time` seconds, with only what is shown. */
export function readSample(metrics, time) {
  const value = (name) => valueOf(metrics, name);
  const finished = metrics.get("request_success_total") ?? [];
  return {
    time,
    running: value("num_requests_running"),
    waiting: value("num_requests_waiting"),
    total: value("kv_blocks"),
    used: value("kv_blocks_used"),
    cached: value("kv_blocks_cached"),
    free: value("kv_blocks_free"),
    shared: value("kv_blocks_shared"),
    saved: value("kv_blocks_saved"),
    refs: value("kv_block_refs"),
    slotsUsed: value("kv_slots_used"),
    slotsUnfilled: value("kv_slots_unfilled"),
    slotsReserved: value("kv_slots_reserved"),
    generated: value("generation_tokens_total"),
    prompted: value("prompt_tokens_total"),
    queries: value("prefix_cache_queries_total"),
    hits: value("prefix_cache_hits_total"),
    preemptions: value("num_preemptions_total"),
    swapPreemptions: value("num_swap_preemptions_total"),
    swapped: value("num_requests_swapped"),
    swapUsage: value("cpu_cache_usage_perc"),
    blocksOut: value("swapped_out_blocks_total"),
    blocksIn: value("swapped_in_blocks_total"),
    evictions: value("kv_block_evictions_total"),
    copies: value("kv_block_copies_total"),
    forks: value("kv_forks_total"),
    finished: Object.fromEntries(
      finished.map(({ labels, value: number }) => [labels.finished_reason, number]),
    ),
    ttft: bucketsOf(metrics, "time_to_first_token_seconds"),
    itl: bucketsOf(metrics, "inter_token_latency_seconds"),
    limits: {
      ...labelsOf(metrics, "cache_config_info"),
      ...labelsOf(metrics, "engine_config_info"),
    },
  };
}

/** Whether a later reading can only come from another start of the server. */
export function isRestart(before, after) {
  return ["generated", "prompted", "queries", "evictions"].some((n) => after[n] < before[n]);
}

export function showServer(model, limits) {
  document.title = `${model} · rawpaged`;
  setText(byId("model"), model);
  if (limits.device === undefined) return; // an engine that tells nothing of itself
  const elements = limits.cache_dtype === limits.dtype ? "" : `, ${limits.cache_dtype}`;
  const entries = [
    ["device", `${limits.device} ${limits.dtype}`],
    ["pool", `${count(limits.num_gpu_blocks)} × ${limits.block_size} tokens${elements}`],
    ["longest request", `${count(limits.max_model_len)} tokens`],
    ["step", `${count(limits.max_num_seqs)} requests, ${count(limits.max_num_batched_tokens)} tokens`],
    ["prefix cache", limits.enable_prefix_caching === "True" ? "on" : "off"],
  ];
  const list = byId("limits");
  if (list.childElementCount !== entries.length) {
    list.replaceChildren(...entries.map(() => element("div", "", element("dt"), element("dd"))));
  }
  entries.forEach(([name, value], i) => {
    setText(list.children[i].firstChild, name);
    setText(list.children[i].lastChild, value);
  });
}

export function showStrip(history) {
  // An engine that has not told anything yet has no blocks.
  const of = (read) =>
    history.series((i) => read(history.samples[i]) / (history.samples[i].total || 1));
  const [none, used, held] = [of(() => 0), of((s) => s.used), of((s) => s.used + s.cached)];
  draw(byId("strip"), [
    ["cached", areaPath(used, held, 1000, 100, 1)],
    ["used", areaPath(none, used, 1000, 100, 1)],
  ]);
  const { last } = history;
  const most = Math.max(...used.map(([, value]) => value));
  setText(
    byId("strip-text"),
    `Last ${SECONDS / 60} minutes: ${percent(last.used, last.total)} of the pool in use, ` +
      `${percent(most, 1)} at most; ${percent(last.cached, last.total)} cached`,
  );
  setText(
    byId("pool-note"),
    `${plural(last.used, "block")} used, ${count(last.cached)} cached, ${count(last.free)} free`,
  );
}

export function showSlots(sample) {
  const slots = sample.slotsUsed + sample.slotsUnfilled + sample.slotsReserved;
  const size = sample.used > 0 ? slots / sample.used : 0;
  const all = sample.total * size;
  const parts = [
    ["tokens", sample.slotsUsed],
    ["unfilled", sample.slotsUnfilled],
    ["reserved", sample.slotsReserved],
    ["cached", sample.cached * size],
  ];
  byId("stack").replaceChildren(
    ...parts.map(([name, number]) => {
      const part = element("span", name);
      part.style.setProperty("flex-basis", `${all > 0 ? (100 * number) / all : 0}%`);
      return part;
    }),
  );
  // A server without a swap space, or one that has not needed it, says nothing of it.
  const swap =
    sample.blocksOut > 0
      ? [["swap space", percent(sample.swapUsage, 1), `${plural(sample.swapped, "request")} in it`]]
      : [];
  const ofSlots = (number) => (slots > 0 ? `${percent(number, slots)} of the slots in use` : "");
  setRows(byId("slots"), [
    ["tokens", count(sample.slotsUsed), ofSlots(sample.slotsUsed), "key tokens"],
    ["unfilled", count(sample.slotsUnfilled), "ends of last blocks", "key unfilled"],
    ["reserved", count(sample.slotsReserved), "for prompts under way", "key reserved"],
    ["cached blocks", count(sample.cached), "held by nobody", "key cached"],
    ["shared blocks", count(sample.shared), "with several owners"],
    [
      "saved by sharing",
      count(sample.saved),
      sample.refs > 0 ? `${percent(sample.saved, sample.refs)} of ${plural(sample.refs, "block")}` : "blocks",
    ],
    ...swap,
  ]);
}

export function showTotals(sample) {
  const ended = REASONS.map((reason) => [reason, sample.finished[reason] ?? 0]);
  const sum = ended.reduce((total, [, number]) => total + number, 0);
  const words = ended.filter(([, number]) => number > 0).map(([r, n]) => `${count(n)} ${r}`);
  setRows(byId("totals"), [
    ["requests ended", count(sum), words.join(", ")],
    ["tokens", count(sample.generated), `after ${count(sample.prompted)} of prompts`],
    ["forks", count(sample.forks), `${plural(sample.copies, "block")} copied on write`],
    [
      "preemptions",
      count(sample.preemptions),
      sample.swapPreemptions > 0 ? `${count(sample.swapPreemptions)} by swap` : "",
    ],
    ...(sample.blocksOut > 0
      ? [["swapped blocks", count(sample.blocksOut), `${count(sample.blocksIn)} came back`]]
      : []),
    ["evictions", count(sample.evictions), "cached blocks given away"],
  ]);
}
