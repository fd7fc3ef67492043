// An operation of all ranks of a communicator.
#pragma once

#include <string>
#include <vector>

#include "operation.h"

namespace npusim::hccl {

// Bytes at a device address.
struct Block {
  uint8_t* address = nullptr;
  uint64_t bytes = 0;
};

// Who gives what to whom: block j of `out` goes to rank j, block j of `in` comes from rank j; the
// own entries are a copy inside the rank. Where something is reduced, all blocks of `in` are one.
struct CollectivePlan {
  Descriptor what;
  std::vector<Block> out;
  std::vector<Block> in;
};

class Collective : public Operation {
 public:
  Collective(Shared communicator, CollectivePlan plan);

 protected:
  uint64_t bytes_out() const override { return total(plan_.out); }
  uint64_t bytes_in() const override { return total(plan_.in); }
  Lanes lanes() const override;
  void announce() override;
  bool met() override;
  Step move() override;
  std::vector<int> missing() const override;
  std::string what() const override;

 private:
  uint64_t total(const std::vector<Block>& blocks) const;
  void compare(int rank) const;
  bool send(int rank);
  bool place(int rank);
  bool copy_own();
  bool reduce();
  size_t reducible_now() const;
  bool ended() const;

  const CollectivePlan plan_;
  const int self_;
  uint64_t number_ = 0;  // of this collective on its communicator, counted from 1
  std::vector<uint64_t> sent_;    // bytes, by rank
  std::vector<uint64_t> landed_;  // bytes, by rank; alike for all ranks where something is reduced
};

}  // namespace npusim::hccl
