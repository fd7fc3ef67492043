// One rank's end of a communicator.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "segment.h"
#include "settings.h"
#include "types.h"

namespace npusim::hccl {

// Which lanes an operation uses: one bit for each other rank. Two operations of one rank never use
// one lane at a time.
struct Lanes {
  uint32_t out = 0;
  uint32_t in = 0;
};

class Communicator {
 public:
  Communicator(std::unique_ptr<Segment> segment, int rank, std::string name,
               const Settings& settings);

  int rank() const { return rank_; }
  int size() const { return segment_->ranks(); }
  const std::string& name() const { return name_; }
  const Settings& settings() const { return settings_; }
  int world_rank() const { return world_rank_; }
  Seat& seat(int rank) const { return segment_->seat(rank); }
  Lane& out(int peer) const { return segment_->lane(rank_, peer); }
  Lane& in(int peer) const { return segment_->lane(peer, rank_); }
  // For instance "rank 3 (process 77, dead)".
  std::string peer(int rank) const;
  bool alive(int rank) const;

  // Destroyed by the program: what still runs ends with an error.
  void stop() { stopped_ = true; }
  bool stopped() const { return stopped_; }
  // As NCCL can: what still runs ends as if it were through, whatever it has moved by then.
  void abort() {
    aborted_ = true;
    stop();
  }
  bool aborted() const { return aborted_; }

  // Below: called by tasks, that is by one thread at a time.
  // Throws Failure when the communicator was destroyed or an operation on it has failed.
  void check() const;
  void fail(const std::string& why);
  bool reserve(Lanes lanes);  // false: another operation uses one of them
  void release(Lanes lanes);
  uint64_t next_collective() { return ++collectives_; }
  uint64_t next_sent(int peer) { return ++sent_[peer]; }
  uint64_t next_received(int peer) { return ++received_[peer]; }

 private:
  std::unique_ptr<Segment> segment_;
  const int rank_;
  const std::string name_;
  const Settings settings_;
  const int world_rank_;
  std::atomic<bool> stopped_{false};
  std::atomic<bool> aborted_{false};
  std::string failure_;  // why nothing works any more
  Lanes busy_;
  uint64_t collectives_ = 0;
  std::vector<uint64_t> sent_;
  std::vector<uint64_t> received_;
};

using Shared = std::shared_ptr<Communicator>;

// Whether a process exists and has not ended.
bool process_alive(int process);

}  // namespace npusim::hccl
