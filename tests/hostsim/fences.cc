// Happens-before between blocks, for kernels in which the block that comes last takes over what
// the others wrote ("threadFenceReduction" of NVIDIA's samples): a thread writes, passes a
// __threadfence, maybe a barrier, and counts up atomically; whoever counts later may read it.

#include "fences.h"

#include <memory>
#include <unordered_map>
#include <vector>

#include "block.h"

namespace hostsim {

namespace {

// What a block had made visible when one of its threads updated an address atomically.
struct Release {
  uint32_t block;
  int thread;
  int barriers;
  std::vector<int> fences;  // of each thread: barriers passed at its last fence, or -1
};

// Since when the running block knows of a release: the thread at once, others from a barrier on.
struct Acquired {
  std::shared_ptr<const Release> release;
  int thread;
  int barriers;
};

std::vector<int> fences;
std::unordered_map<const void*, std::vector<std::shared_ptr<const Release>>> releases;
std::unordered_multimap<uint32_t, Acquired> acquired;  // by block

bool releases_event(const Release& release, int thread, int barriers) {
  const int own_fence = release.fences[release.thread];
  if (thread == release.thread) return barriers <= own_fence;
  if (barriers < own_fence) return true;
  return barriers < release.barriers && barriers <= release.fences[thread];
}

}  // namespace

void begin_fences() { releases.clear(); }

void begin_block_fences() {
  fences.assign(block.num_threads, -1);
  acquired.clear();
}

void memory_fence() {
  if (!fences.empty()) fences[current->number] = current->barriers;
}

void hand_over(const void* address) {
  const auto found = releases.find(address);
  if (found != releases.end())
    for (const auto& release : found->second)
      if (release->block != block.number)
        acquired.insert({release->block, {release, current->number, current->barriers}});
  if (fences[current->number] < 0) return;
  releases[address].push_back(std::make_shared<Release>(
      Release{block.number, current->number, current->barriers, fences}));
}

bool was_handed_over(const Event& event) {
  if (acquired.empty()) return false;
  const uint32_t number = event.thread - 1;
  const auto range = acquired.equal_range(number / block.num_threads);
  for (auto it = range.first; it != range.second; ++it) {
    const Acquired& entry = it->second;
    const bool known = current->number == entry.thread || current->barriers > entry.barriers;
    if (known && releases_event(*entry.release, number % block.num_threads, event.barriers))
      return true;
  }
  return false;
}

}  // namespace hostsim
