// SPDX-License-Identifier: Apache-2.0
// What reads packs and spreads them: megagraph/_C.pyi is its manual.
#include <limits>

#include "csrc/decide/best_capacities.h"
#include "csrc/decide/pack_schedule.h"
#include "csrc/decide/stage_schedule.h"
#include "csrc/python/bindings.h"
#include "csrc/python/eager_reasons.h"
#include "csrc/python/pack_dealing.h"
#include "csrc/python/pack_reader.h"
#include "csrc/watch/hash.h"

namespace py = pybind11;

namespace megagraph {
namespace {

// Offsets are int32.
int64_t positive(const char* name, const py::object& value) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const bool is_integer = PyLong_Check(value.ptr()) && !PyBool_Check(value.ptr());
  int is_beyond = 0;
  const int64_t number = is_integer ? PyLong_AsLongLongAndOverflow(value.ptr(), &is_beyond) : 0;
  if (is_beyond == 0 && number >= 1 && number <= kMost) return number;
  throw py::value_error(std::string(name) + " must be an integer from 1 to " +
                        std::to_string(kMost) + ", got " + py::repr(value).cast<std::string>());
}

size_t hash_of(int64_t number) { return static_cast<size_t>(number); }

size_t hash_of(const std::optional<bool>& value) { return value ? 1 + *value : 0; }

size_t hash_of(const std::optional<Capacity>& value);

template <typename... Each>
size_t hash_of(const std::tuple<Each...>& values) {
  Hash hash;
  std::apply([&](const auto&... each) { (hash.mix(hash_of(each)), ...); }, values);
  return hash.value();
}

size_t hash_of(const std::optional<Capacity>& value) {
  return value ? hash_of(value->values()) : 0;
}

// Shown and made anew by the values of a struct.
template <typename Class>
void with_values(Class& bound, const std::vector<const char*>& names) {
  bound.def("__repr__", [names](const py::object& value) {
    std::string text = py::type::of(value).attr("__name__").cast<std::string>() + "(";
    for (size_t i = 0; i < names.size(); ++i) {
      text += std::string(i == 0 ? "" : ", ") + names[i] + "=" +
              py::repr(value.attr(names[i])).cast<std::string>();
    }
    return text + ")";
  });
  // Another one, of which some values are others.
  bound.def("replace", [names](const py::object& value, const py::kwargs& others) {
    py::dict fields;
    for (const char* name : names) fields[name] = value.attr(name);
    for (const auto& [name, other] : others) fields[name] = other;
    return py::type::of(value)(**fields);
  });
  bound.def("as_dict", [names](const py::object& value) {
    py::dict fields;
    for (const char* name : names) fields[name] = value.attr(name);
    return fields;
  });
  // Pickled and copied as a call with its values.
  bound.def("__reduce__", [names](const py::object& value) {
    const py::object make = py::module_::import("functools").attr("partial");
    py::dict fields;
    for (const char* name : names) fields[name] = value.attr(name);
    return py::make_tuple(make(py::type::of(value), **fields), py::tuple());
  });
}

// Like Python's own values: also equal, ordered and hashed by all of them.
template <typename Class, typename Type = typename Class::type>
void like_values(Class& bound, const std::vector<const char*>& names) {
  bound.def(
      "__eq__", [](const Type& one, const Type& other) { return one == other; }, py::is_operator());
  bound.def(
      "__lt__", [](const Type& one, const Type& other) { return one < other; }, py::is_operator());
  bound.def("__hash__", [](const Type& value) { return hash_of(value.values()); });
  with_values(bound, names);
}

}  // namespace

void bind_packs(py::module_& m) {
  py::class_<Capacity> capacity(m, "Capacity",
                                "What one captured variant can hold. Raises ValueError for what is "
                                "no integer, or less than 1.");
  capacity
      .def(py::init([](const py::object& tokens, const py::object& num_seqs,
                       const py::object& max_seqlen) {
             return Capacity{positive("a capacity's tokens", tokens),
                             positive("a capacity's num_seqs", num_seqs),
                             positive("a capacity's max_seqlen", max_seqlen)};
           }),
           py::kw_only(), py::arg("tokens"), py::arg("num_seqs"), py::arg("max_seqlen"))
      .def_readonly("tokens", &Capacity::tokens)
      .def_readonly("num_seqs", &Capacity::num_seqs)
      .def_readonly("max_seqlen", &Capacity::max_seqlen)
      .def(
          "shared_by",
          [](const Capacity& own, int64_t cp_size) {
            const bool is_whole = own.max_seqlen == own.tokens;
            return is_whole ? Capacity{own.tokens, own.num_seqs, own.tokens * cp_size} : own;
          },
          py::arg("cp_size"))
      .def("__str__", [](const Capacity& own) {
        return std::to_string(own.tokens) + " tokens, " + std::to_string(own.num_seqs) +
               " documents of up to " + std::to_string(own.max_seqlen);
      });
  like_values(capacity, {"tokens", "num_seqs", "max_seqlen"});
  py::class_<PackShape> shape(m, "PackShape");
  shape
      .def(py::init([](int64_t tokens, int64_t num_seqs, int64_t max_seqlen, int64_t cp_size) {
             return PackShape{tokens, num_seqs, max_seqlen, cp_size};
           }),
           py::arg("tokens"), py::arg("num_seqs"), py::arg("max_seqlen"), py::arg("cp_size") = 1)
      .def_readonly("tokens", &PackShape::tokens)
      .def_readonly("num_seqs", &PackShape::num_seqs)
      .def_readonly("max_seqlen", &PackShape::max_seqlen)
      .def_readonly("cp_size", &PackShape::cp_size)
      .def_static("of", &pack_shape, py::arg("params"), py::arg("tokens"), py::arg("extra_seqs"),
                  py::arg("cp_size") = 1)
      .def("exceeds", &PackShape::exceeds, py::arg("capacity"));
  like_values(shape, {"tokens", "num_seqs", "max_seqlen", "cp_size"});
  m.def("needs_of", &needs_of, py::arg("observed"), py::arg("extra_seqs") = 0,
        py::arg("expected_tokens") = 0);
  m.def("capacities_for", &capacities_for, py::arg("needs"), py::arg("extra_seqs") = 0,
        py::arg("cp_size") = 1);
  m.def(
      "best_capacities",
      [](const std::map<PackShape, int64_t>& packs, const std::pair<int64_t, int64_t>& room,
         int64_t multiple, int captures) {
        std::vector<std::pair<std::vector<Capacity>, int64_t>> found;
        for (auto& [capacities, padded] :
             best_capacities(packs, {room.first, room.second}, multiple, captures)) {
          found.emplace_back(capacities, padded);
        }
        return found;
      },
      py::arg("packs"), py::kw_only(), py::arg("room"), py::arg("multiple"), py::arg("captures"));
  py::class_<PackForm> form(m, "PackForm");
  form.def(py::init([](bool has_padded, bool is_aliased, std::optional<bool> pad_between_seqs,
                       bool has_seq_idx) {
             return PackForm{has_padded, is_aliased, pad_between_seqs, has_seq_idx};
           }),
           py::arg("has_padded"), py::arg("is_aliased"), py::arg("pad_between_seqs"),
           py::arg("has_seq_idx") = false)
      .def_readonly("has_padded", &PackForm::has_padded)
      .def_readonly("is_aliased", &PackForm::is_aliased)
      .def_readonly("pad_between_seqs", &PackForm::pad_between_seqs)
      .def_readonly("has_seq_idx", &PackForm::has_seq_idx)
      .def_static(
          "of", [](const py::handle& params) { return pack_form(params, std::nullopt); },
          py::arg("params"));
  like_values(form, {"has_padded", "is_aliased", "pad_between_seqs", "has_seq_idx"});
  py::class_<VariantKey> key(m, "VariantKey");
  key.def(py::init([](std::optional<Capacity> capacity, const PackForm& form, bool grad,
                      int64_t state, bool has_mask, int64_t cp_size, bool by_token) {
            return VariantKey{capacity, form, grad, state, has_mask, cp_size, by_token};
          }),
          py::arg("capacity"), py::arg("form"), py::arg("grad"), py::arg("state") = 0,
          py::arg("has_mask") = false, py::arg("cp_size") = 1, py::arg("by_token") = false)
      .def_readonly("capacity", &VariantKey::capacity)
      .def_readonly("form", &VariantKey::form)
      .def_readonly("grad", &VariantKey::grad)
      .def_readonly("state", &VariantKey::state)
      .def_readonly("has_mask", &VariantKey::has_mask)
      .def_readonly("cp_size", &VariantKey::cp_size)
      .def_readonly("by_token", &VariantKey::by_token)
      .def_property_readonly("kind", &VariantKey::kind)
      .def_property_readonly("family", &VariantKey::family);
  like_values(key, {"capacity", "form", "grad", "state", "has_mask", "cp_size", "by_token"});
  py::class_<StageSchedule>(m, "StageSchedule")
      .def(py::init([](int64_t stages, int64_t stage, int64_t chunks,
                       std::optional<int64_t> group_size, bool has_expert_overlap) {
             const StageSchedule made{stages, stage, chunks, group_size, has_expert_overlap};
             made.check();
             return made;
           }),
           py::kw_only(), py::arg("stages") = 1, py::arg("stage") = 0, py::arg("chunks") = 1,
           py::arg("group_size") = py::none(), py::arg("has_expert_overlap") = false)
      .def_readonly("stages", &StageSchedule::stages)
      .def_readonly("stage", &StageSchedule::stage)
      .def_readonly("chunks", &StageSchedule::chunks)
      .def_readonly("group_size", &StageSchedule::group_size)
      .def_readonly("has_expert_overlap", &StageSchedule::has_expert_overlap)
      .def("is_legal", &StageSchedule::is_legal, py::arg("count"))
      .def(
          "passes",
          [](const StageSchedule& own, int64_t count, bool forward_only) {
            py::list order;
            for (const Pass& it : own.passes(count, forward_only)) {
              order.append(py::make_tuple(it.is_forward, it.chunk, it.micro_batch));
            }
            return order;
          },
          py::arg("count"), py::kw_only(), py::arg("forward_only") = false)
      .def("in_flight", &StageSchedule::in_flight, py::arg("count"))
      .def_property_readonly("most_in_flight", &StageSchedule::most_in_flight);
  py::class_<ScheduledPack>(m, "ScheduledPack")
      .def_readonly("cp_size", &ScheduledPack::cp_size)
      .def_readonly("first_rank", &ScheduledPack::first_rank)
      .def_readonly("documents", &ScheduledPack::documents);
  py::class_<PackSchedule>(m, "PackSchedule")
      .def_readonly("micro_batches", &PackSchedule::micro_batches)
      .def_readonly("costs", &PackSchedule::costs)
      .def("of_rank", &PackSchedule::of_rank, py::arg("rank"));
  py::class_<ScheduleLimits> limits(m, "ScheduleLimits");
  limits
      .def(py::init([](int64_t ranks, std::vector<int64_t> cp_sizes, int64_t max_tokens,
                       int64_t max_seqs, int64_t alignment, int64_t attention_parity,
                       double exchange, int64_t multiple) {
             const ScheduleLimits made{ranks,     std::move(cp_sizes), max_tokens, max_seqs,
                                       alignment, attention_parity,    exchange,   multiple};
             made.check();
             return made;
           }),
           py::kw_only(), py::arg("ranks"), py::arg("cp_sizes"),
           py::arg("max_seqlen_per_dp_cp_rank"), py::arg("max_packed_seqs"),
           py::arg("alignment") = 1, py::arg("attention_parity") = 49152,
           py::arg("exchange") = 0.05, py::arg("micro_batch_multiple") = 1)
      .def_readonly("ranks", &ScheduleLimits::ranks)
      .def_property_readonly(
          "cp_sizes", [](const ScheduleLimits& own) { return py::tuple(py::cast(own.cp_sizes)); })
      .def_readonly("max_seqlen_per_dp_cp_rank", &ScheduleLimits::max_tokens)
      .def_readonly("max_packed_seqs", &ScheduleLimits::max_seqs)
      .def_readonly("alignment", &ScheduleLimits::alignment)
      .def_readonly("attention_parity", &ScheduleLimits::attention_parity)
      .def_readonly("exchange", &ScheduleLimits::exchange)
      .def_readonly("micro_batch_multiple", &ScheduleLimits::multiple)
      .def(
          "rows",
          [](const ScheduleLimits& own, int64_t length, int64_t cp_size) {
            own.require_size(cp_size);
            return own.rows(positive("a document's length", py::int_(length)), cp_size);
          },
          py::arg("length"), py::arg("cp_size"))
      .def(
          "capacity",
          [](const ScheduleLimits& own, int64_t cp_size, int64_t extra_seqs) {
            own.require_size(cp_size);
            return Capacity{
                own.max_tokens,
                positive("a capacity's num_seqs", py::int_(own.max_seqs + extra_seqs)),
                positive("a capacity's max_seqlen", py::int_(own.max_tokens * cp_size))};
          },
          py::arg("cp_size"), py::kw_only(), py::arg("extra_seqs") = 0);
  with_values(limits, {"ranks", "cp_sizes", "max_seqlen_per_dp_cp_rank", "max_packed_seqs",
                       "alignment", "attention_parity", "exchange", "micro_batch_multiple"});
  m.def("schedule_packs", &schedule_packs, py::arg("lengths"), py::arg("limits"),
        py::call_guard<py::gil_scoped_release>());
  m.def("share", &share, py::arg("tensor"), py::arg("rows"), py::arg("size"), py::arg("place"));
  py::class_<PackDealing>(m, "PackDealing")
      .def(py::init<PackSchedule, ScheduleLimits, const std::vector<std::vector<int64_t>>&,
                    int64_t>(),
           py::arg("schedule"), py::arg("limits"), py::arg("lengths"), py::arg("rank"))
      .def("outgoing", &PackDealing::outgoing, py::arg("documents"), py::arg("types"),
           py::arg("device"))
      .def_property_readonly("sent_rows", &PackDealing::sent_rows)
      .def_property_readonly("taken_rows", &PackDealing::taken_rows)
      .def("packs", &PackDealing::packs, py::arg("taken"), py::arg("types"));
}

}  // namespace megagraph
