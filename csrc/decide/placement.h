// SPDX-License-Identifier: Apache-2.0
// Packs that are being filled: how many each group has, which documents are in them, and what a
// document costs each rank that shares it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/decide/pack_schedule.h"

namespace megagraph {

// What a document costs each rank that shares it, for each size of a group.
// Sizes are known by their place in `cp_sizes`, the level.
class DocumentCosts {
 public:
  DocumentCosts(const std::vector<int64_t>& lengths, const ScheduleLimits& limits);

  int num_documents() const { return num_documents_; }
  int num_levels() const { return num_levels_; }
  // The longest first.
  const std::vector<int>& by_length() const { return by_length_; }
  // Rows of the document on each rank, padding included.
  int64_t rows(int document, int level) const { return table_[at(document, level)].rows; }
  // A token's way through a layer without attention is 1.
  double cost(int document, int level) const { return table_[at(document, level)].cost; }
  // The lowest level at which the document fits a rank and costs it at most `limit`; where none
  // does, the one that costs least; -1 where it fits at none.
  int level(int document, double limit) const;

 private:
  struct Entry {
    int64_t rows;
    double cost;
  };

  size_t at(int document, int level) const {
    return static_cast<size_t>(document) * num_levels_ + level;
  }

  int num_documents_, num_levels_;
  int64_t max_tokens_;
  std::vector<Entry> table_;
  std::vector<int> by_length_;
};

// Group g of a level is the ranks from g * size on.
struct OpenPack {
  int level;
  int64_t group;
  int64_t rows = 0;  // on each rank
  std::vector<int> documents = {};
};

enum class Filling { kDone, kNoRoom, kEmptyPack };

struct Policy {
  double limit;        // a document that costs a rank more is given to more ranks
  int64_t places = 0;  // at least so many packs of single ranks: else the longest documents go up
  bool prefers_fullest = false;  // of a group's packs with room, else the emptiest
};

// Every rank has `num_micro_batches` packs in the end, those of its groups included.
class Placement {
 public:
  Placement(const DocumentCosts& costs, const ScheduleLimits& limits, int64_t num_micro_batches);

  // Places all documents and leaves no pack empty, or says why not. Once for each object.
  Filling fill(const Policy& policy);

  const std::vector<OpenPack>& packs() const { return packs_; }
  const std::vector<double>& loads() const { return loads_; }
  const DocumentCosts& costs() const { return *costs_; }
  int64_t size_of(int level) const { return limits_->cp_sizes[level]; }
  double largest_load() const;
  // Of the ranks of a group, the largest.
  double load(int level, int64_t group) const;
  bool fits(int document, const OpenPack& pack) const;
  // For one more document, of so many rows.
  bool has_room(const OpenPack& pack, int64_t rows) const {
    return pack.rows + rows <= limits_->max_tokens &&
           static_cast<int64_t>(pack.documents.size()) < limits_->max_seqs;
  }
  // By index in `packs()`; keeps loads and rows.
  void add(int pack, int document);
  void remove(int pack, int document);
  // The packs of one group, not those of larger ones.
  const std::vector<int>& packs_of(int level, int64_t group) const { return nodes_[level][group]; }

 private:
  std::vector<int> levels(const Policy& policy) const;
  bool place(int document, int level, const Policy& policy);
  bool place_on_larger(int document, int level, const Policy& policy);
  // Into one of the packs that the group has.
  void add_to(int document, int level, int64_t group, const Policy& policy);
  int open(int level, int64_t group);
  // Packs that may still be opened for a group while its smaller groups have none.
  int64_t num_free(int level, int64_t group) const;
  void open_lowest();
  void set_room(int level, int64_t group);
  bool fill_empty_packs();
  bool take_for(int empty, std::vector<int>& donors);
  bool merge(int empty);
  int lift(int level, int64_t group, int empty);
  bool absorb(int pack, int other);

  const DocumentCosts* costs_;
  const ScheduleLimits* limits_;
  int64_t num_micro_batches_;
  std::vector<OpenPack> packs_;                       // one of level -1 was merged into another
  std::vector<std::vector<std::vector<int>>> nodes_;  // packs by level and group
  std::vector<std::vector<int64_t>> room_;            // rows, of the emptiest pack
  std::vector<double> loads_;                         // of each rank
};

}  // namespace megagraph
