// SPDX-License-Identifier: Apache-2.0
// What decides on micro-batches: megagraph/_C.pyi is its manual.
#include "csrc/python/bindings.h"
#include "csrc/python/canonical_packs.h"
#include "csrc/python/constants.h"
#include "csrc/python/dispatcher.h"
#include "csrc/python/eager_reasons.h"
#include "csrc/python/micro_batch.h"
#include "csrc/python/module_calls.h"
#include "csrc/python/rank_places.h"
#include "csrc/python/variant_layout.h"
#include "csrc/torch/thread_state.h"

namespace py = pybind11;

namespace megagraph {
namespace {

// Lets Python's collector see what a micro-batch holds. Nothing has to be cleared: every circle
// through one goes through the dictionary of a pack.
void let_collect(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const auto* instance = reinterpret_cast<py::detail::instance*>(self);
    if (!instance->simple_layout) return 0;  // it is being made
    const auto* batch = static_cast<const MicroBatch*>(instance->simple_value_holder[0]);
    if (batch == nullptr) return 0;
    for (PyObject* held : batch->held()) Py_VISIT(held);
    return 0;
  };
}

std::map<int64_t, std::map<std::string, int64_t>> named_counts(const Dispatcher& dispatcher) {
  std::map<int64_t, std::map<std::string, int64_t>> found;
  for (const auto& [cp_size, counts] : dispatcher.counts()) {
    for (const auto& [reason, count] : counts) {
      const char* name = reason ? kEagerReasonNames[static_cast<size_t>(*reason)] : "replayed";
      found[cp_size][name] = count;
    }
  }
  return found;
}

}  // namespace

void bind_dispatch(py::module_& m) {
  py::class_<States>(m, "States")
      .def(py::init<int, bool>(), py::arg("size"), py::kw_only(), py::arg("run_alike") = true)
      .def("local_state", &States::local_state, py::arg("rank"), py::arg("fingerprint"),
           py::arg("settings"))
      .def("agree", &States::agree, py::arg("largest"))
      .def_property_readonly("current", &States::current)
      .def_property_readonly("is_new", &States::is_new)
      .def("is_met", &States::is_met, py::arg("fingerprint"), py::arg("settings"))
      .def("has_many", &States::has_many)
      .def("forget_oldest", &States::forget_oldest, py::arg("keep"))
      .def("add_name", &States::add_name, py::arg("fingerprint"))
      .def("rename", &States::rename, py::arg("fingerprint"))
      .def("of_call", &States::of_call, py::arg("fingerprint"))
      .def("under", &States::under, py::arg("settings"))
      .def("ask_for_place", &States::ask_for_place, py::arg("captured"), py::arg("most"))
      .def("make_room", &States::make_room, py::arg("captured"), py::arg("most"))
      .def("eager_reason", &States::eager_reason, py::arg("number"), py::arg("captured"));
  py::class_<DueVariants>(m, "DueVariants")
      .def(py::init<int>(), py::arg("warm_up_steps"))
      .def("note", &DueVariants::note, py::arg("kind"))
      .def("end_step", &DueVariants::end_step)
      .def("due_in", &DueVariants::due_in, py::arg("state"), py::arg("grad_enabled"))
      .def("mark_captured", &DueVariants::mark_captured, py::arg("kinds"))
      .def("forget_graphs", &DueVariants::forget_graphs, py::kw_only(),
           py::arg("only_training") = false)
      .def("forget_states", &DueVariants::forget_states, py::arg("states"))
      .def_property_readonly("is_warm", &DueVariants::is_warm)
      .def_property_readonly("warmed_up", &DueVariants::warmed_up)
      .def_property_readonly("due", &DueVariants::due)
      .def_property_readonly("captured", &DueVariants::captured)
      .def("states_with_graphs", &DueVariants::states_with_graphs);
  m.def("has_forwards", &has_forwards, py::arg("model"), py::arg("of_model"), py::arg("of_block"));
  m.def("has_layers", &has_layers, py::arg("model"));
  m.def("by_name", &by_name, py::arg("names"), py::arg("args"), py::arg("kwargs"));
  m.def("is_skipped", &is_skipped);
  m.def("set_skipped", &set_skipped, py::arg("is_skipped"));
  m.def("mark_canonical", &mark_canonical, py::arg("params"), py::kw_only(),
        py::arg("by_token") = false);
  m.def("is_canonical", &is_canonical, py::arg("offsets"));
  m.def("is_by_token", &is_by_token, py::arg("offsets"));
  m.def("without_ranks", &without_ranks, py::arg("params"));
  m.def("with_tail_as_document", &with_tail_as_document, py::arg("params"), py::arg("rows"));
  py::class_<ShownRanks>(m, "ShownRanks").def("put_back", &ShownRanks::put_back);
  py::class_<RankPlaces>(m, "RankPlaces")
      .def(py::init<const py::iterable&, const std::vector<std::string>&, py::object, bool>(),
           py::arg("modules"), py::arg("collections"), py::arg("metrics"), py::kw_only(),
           py::arg("weighs_losses"))
      .def("show", &RankPlaces::show, py::arg("group"), py::arg("size"), py::arg("times"),
           py::kw_only(), py::arg("leaves_metrics"));
  m.def("as_pack", &as_pack, py::arg("params"), py::arg("ids"), py::arg("hidden_states"));
  m.def("are_equal", &are_equal, py::arg("one"), py::arg("other"));
  // Local to this module are those that each micro-batch asks for: pybind11 looks there first.
  py::class_<Constants>(m, "Constants", py::module_local())
      .def(py::init([](const py::dict& given) {
             py::dict values;
             for (const auto& [name, value] : given) {
               if (!value.is_none()) values[name] = value;
             }
             return std::make_unique<Constants>(values);
           }),
           py::arg("given"))
      .def_property_readonly("values", &Constants::values)
      .def("set", &Constants::set, py::arg("name"), py::arg("value"))
      .def("are", &Constants::are, py::arg("arguments"))
      .def("hold", &Constants::hold, py::arg("arguments"))
      .def("is_equal", &Constants::is_equal, py::arg("name"), py::arg("value"));
  py::class_<VariantLayout>(m, "VariantLayout")
      .def_readonly("metadata", &VariantLayout::metadata)
      .def_readonly("is_whole", &VariantLayout::is_whole)
      .def_readonly("end_source", &VariantLayout::end_source)
      .def_readonly("end_buffer", &VariantLayout::end_buffer);
  py::class_<CanonicalPacks, std::shared_ptr<CanonicalPacks>>(m, "CanonicalPacks")
      .def(py::init<VariantKey, int64_t>(), py::arg("key"), py::arg("extra_seqs"))
      .def(
          "layout",
          [](const CanonicalPacks& packs, int64_t rows, const at::Tensor& valid_tokens,
             const py::object& freqs, bool masks_tail) {
            return VariantLayout(packs, rows, valid_tokens, freqs_in(freqs), masks_tail);
          },
          py::kw_only(), py::arg("rows"), py::arg("valid_tokens"), py::arg("freqs"),
          py::arg("masks_tail"))
      .def("make", &CanonicalPacks::make, py::arg("params_type"), py::arg("actual"),
           py::arg("padded") = py::none(), py::arg("seq_idx") = py::none());
  py::class_<MicroBatch>(m, "MicroBatch", py::module_local(), py::custom_type_setup(&let_collect))
      .def_property_readonly("key", &MicroBatch::python_key)
      .def_property_readonly("capacity", [](const MicroBatch& own) { return own.key().capacity; })
      .def_property_readonly("tokens", &MicroBatch::tokens)
      .def_property("reason", &MicroBatch::reason, &MicroBatch::set_reason)
      .def_property_readonly("is_ready", &MicroBatch::is_ready)
      .def_property_readonly("params", &MicroBatch::params)
      .def_property_readonly("sources", &MicroBatch::sources)
      .def_property_readonly("mask", &MicroBatch::mask)
      .def_property_readonly("entry_padding", &MicroBatch::entry_padding)
      .def_property_readonly("is_as_given", &MicroBatch::is_as_given)
      .def("as_given", py::overload_cast<EagerReason>(&MicroBatch::run_as_given), py::arg("reason"))
      .def("run_as_given", py::overload_cast<bool>(&MicroBatch::run_as_given), py::kw_only(),
           py::arg("is_own_table"))
      .def("is_own", &MicroBatch::is_own, py::arg("table"), py::arg("hidden_states"))
      .def("given_params", &MicroBatch::given_params, py::kw_only(), py::arg("is_own_table"))
      .def("canonical_params", &MicroBatch::canonical_params)
      .def("constant_params", &MicroBatch::constant_params)
      .def("enter", &MicroBatch::enter, py::arg("given"), py::arg("row_lists"))
      .def("take_freqs", &MicroBatch::take_freqs, py::arg("table"))
      .def("layer_arguments", &MicroBatch::layer_arguments)
      .def("pad", &MicroBatch::pad, py::arg("hidden_states"))
      .def("cut", &MicroBatch::cut, py::arg("hidden_states"))
      .def("first_rows", &MicroBatch::first_rows, py::arg("hidden_states"));
  py::class_<Dispatcher>(m, "Dispatcher", py::module_local())
      .def(py::init([](int64_t extra_seqs, bool depends_on_longest, bool needs_equal_rows,
                       bool masks_tail, bool pads_at_entry, py::object is_own_table,
                       bool is_by_token, bool may_be_by_token, bool cuts_tables, bool is_eager,
                       int64_t cp_size, int ranks, bool run_alike, int warm_up_steps) {
             BatchRules rules{extra_seqs, depends_on_longest, needs_equal_rows,
                              masks_tail, pads_at_entry,      std::move(is_own_table)};
             return std::make_unique<Dispatcher>(
                 DispatchOptions{std::move(rules), is_by_token, may_be_by_token, cuts_tables,
                                 is_eager, cp_size, ranks, run_alike, warm_up_steps});
           }),
           py::kw_only(), py::arg("extra_seqs") = 0, py::arg("depends_on_longest") = false,
           py::arg("needs_equal_rows") = false, py::arg("masks_tail") = false,
           py::arg("pads_at_entry") = false, py::arg("is_own_table") = py::none(),
           py::arg("is_by_token") = false, py::arg("may_be_by_token") = false,
           py::arg("cuts_tables") = false, py::arg("is_eager") = false, py::arg("cp_size") = 1,
           py::arg("ranks") = 1, py::arg("run_alike") = true, py::arg("warm_up_steps") = 1)
      .def("set_capacities", &Dispatcher::set_capacities, py::arg("by_cp_size"),
           py::arg("of_evaluations") = false)
      .def_property_readonly("has_capacities",
                             [](const Dispatcher& it) { return !it.capacities().empty(); })
      .def_property_readonly("by_cp_size", &Dispatcher::capacities)
      .def("set_groups", &Dispatcher::set_groups, py::arg("by_cp_size"))
      .def("use", &Dispatcher::use, py::arg("bank"), py::arg("variants"), py::arg("eager_variants"),
           py::arg("watch"))
      .def("look_for_freqs", &Dispatcher::look_for_freqs, py::arg("table"), py::arg("params"),
           py::arg("tokens"))
      .def_property_readonly("is_by_token", &Dispatcher::is_by_token)
      .def_property_readonly("freqs", &Dispatcher::freqs)
      .def("refuse", &Dispatcher::refuse, py::arg("reason"))
      .def("keep_eager", &Dispatcher::keep_eager, py::arg("reason"), py::arg("gradients_reason"))
      .def("set_suspended", &Dispatcher::set_suspended, py::arg("is_suspended"))
      .def_property_readonly("observed", &Dispatcher::observed)
      .def("count_packs", &Dispatcher::count_packs)
      .def("expect", &Dispatcher::expect, py::arg("seq_length"), py::kw_only(), py::arg("trains"))
      .def("has_trained", &Dispatcher::has_trained)
      .def("has_seen_enough", &Dispatcher::has_seen_enough)
      .def("needs", &Dispatcher::needs)
      .def_property_readonly("states", &Dispatcher::states,
                             py::return_value_policy::reference_internal)
      .def_property_readonly("due", &Dispatcher::due, py::return_value_policy::reference_internal)
      .def("is_unchanged", &Dispatcher::is_unchanged)
      .def_property_readonly("params_type", &Dispatcher::params_type)
      .def_property_readonly("host_names", &Dispatcher::host_names)
      .def_property_readonly("read_names", &Dispatcher::read_names)
      .def_property_readonly("has_new_arguments", &Dispatcher::has_new_arguments)
      .def("eager_reason", &Dispatcher::eager_reason, py::arg("params"), py::arg("tokens"),
           py::arg("is_settled"))
      .def("enter", &Dispatcher::enter, py::arg("params"), py::arg("tokens"), py::arg("mask"),
           py::arg("is_mask_shared"), py::arg("are_megatrons"), py::arg("is_settled"))
      .def("require_rows", &Dispatcher::require_rows, py::arg("tokens"), py::arg("reason"))
      .def("take", &Dispatcher::take, py::arg("batch"), py::arg("hidden_states"), py::arg("table"),
           py::arg("mask"))
      .def("run_as_given", &Dispatcher::run_as_given, py::arg("batch"), py::arg("hidden_states"),
           py::arg("table"))
      .def("turn_eager", &Dispatcher::turn_eager, py::arg("constants"), py::arg("batch"),
           py::arg("hidden_states"), py::arg("table"), py::arg("mask"))
      .def("begin", &Dispatcher::begin, py::arg("batch"))
      .def("expect_state", &Dispatcher::expect_state, py::arg("batch"))
      .def("end", &Dispatcher::end, py::arg("batch"))
      .def("count_eager", &Dispatcher::count_eager, py::arg("reason"))
      .def("counts", &named_counts)
      .def_property_readonly("most_needed", &Dispatcher::most_needed)
      .def_property_readonly("replayed_tokens", &Dispatcher::replayed_tokens);
}

}  // namespace megagraph
