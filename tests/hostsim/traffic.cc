// The n-th access of each lane at one place is taken as one request of the warp.

#include "traffic.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "launch.h"

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;  // by the linker

namespace hostsim {

namespace {

constexpr size_t kSectorBytes = 32, kBankBytes = 4, kBanks = 32;

struct Bytes {
  uintptr_t start;
  size_t size;
};

using Key = std::tuple<const void*, const char*, int, const char*, bool>;

struct Counter {
  std::vector<std::vector<Bytes>> accesses;  // of each thread of the running block
  uint64_t requests = 0, bytes = 0, cost = 0, ideal_cost = 0;
};

std::map<Key, Counter> counters;
std::vector<Traffic> totals;

struct LaneBytes {
  int lane;
  Bytes bytes;
};

void add_global_request(Counter& counter, const std::vector<LaneBytes>& request) {
  std::set<uintptr_t> sectors;
  std::map<uintptr_t, size_t> distinct;
  for (const auto& [lane, bytes] : request) {
    distinct[bytes.start] = std::max(distinct[bytes.start], bytes.size);
    for (uintptr_t s = bytes.start / kSectorBytes; s * kSectorBytes < bytes.start + bytes.size; ++s)
      sectors.insert(s);
  }
  size_t total = 0;
  for (const auto& [start, size] : distinct) total += size;
  counter.bytes += total;
  counter.cost += sectors.size();
  counter.ideal_cost += (total + kSectorBytes - 1) / kSectorBytes;
}

// Accesses of 16 bytes are served for 8 lanes at a time, of 8 bytes for 16 lanes; each group takes
// as many passes as the busiest bank has different words.
void add_shared_request(Counter& counter, const std::vector<LaneBytes>& request) {
  const size_t size = request.front().bytes.size;
  const int group_lanes = size >= 16 ? 8 : size == 8 ? 16 : 32;
  std::map<int, std::map<size_t, std::set<uintptr_t>>> groups;
  for (const auto& [lane, bytes] : request) {
    counter.bytes += bytes.size;
    for (uintptr_t w = bytes.start / kBankBytes; w * kBankBytes < bytes.start + bytes.size; ++w)
      groups[lane / group_lanes][w % kBanks].insert(w);
  }
  for (const auto& [group, banks] : groups) {
    size_t passes = 0;
    for (const auto& [bank, words] : banks) passes = std::max(passes, words.size());
    counter.cost += passes;
    counter.ideal_cost += 1;
  }
}

void add_requests(Counter& counter, bool shared) {
  for (int first = 0; first < block.num_threads; first += kWarpSize) {
    const int last = std::min(first + kWarpSize, block.num_threads);
    for (size_t n = 0;; ++n) {
      std::vector<LaneBytes> request;
      for (int i = first; i < last; ++i)
        if (n < counter.accesses[i].size()) request.push_back({i - first, counter.accesses[i][n]});
      if (request.empty()) break;
      ++counter.requests;
      shared ? add_shared_request(counter, request) : add_global_request(counter, request);
    }
  }
}

}  // namespace

void begin_traffic() { counters.clear(); }

void count_access(Place place, const char* array, uintptr_t offset, size_t size, bool write) {
  Counter& counter = counters[{place.pc, place.site.file, place.site.line, array, write}];
  counter.accesses.resize(kMaxThreads);
  counter.accesses[current->number].push_back({offset, size});
}

void end_block_traffic() {
  for (auto& [key, counter] : counters) {
    add_requests(counter, std::get<3>(key) == nullptr);
    for (auto& accesses : counter.accesses) accesses.clear();
  }
}

}  // namespace hostsim

using namespace hostsim;

// Totals of the last launch; valid until the next.
extern "C" __attribute__((visibility("default"))) const Traffic* hostsim_traffic(uint64_t* count) {
  totals.clear();
  for (const auto& [key, counter] : counters) {
    const auto& [pc, file, line, array, write] = key;
    const uint64_t offset = file ? 0 : (uint64_t)((const char*)pc - &__ehdr_start);
    totals.push_back({file, array, offset, line, write, counter.requests, counter.bytes,
                      counter.cost, counter.ideal_cost});
  }
  *count = totals.size();
  return totals.data();
}
