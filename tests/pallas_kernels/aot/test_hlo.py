from pallas_kernels.aot.hlo import count_other_cycles, find_kernel_calls

HLO = """HloModule jit_f, is_scheduled=true

%fused_computation (p: s32[4]) -> s32[4] {
  ROOT %add.1 = s32[4]{0} add(%p, %p)
}

ENTRY %main.1 (q.1: bf16[8,128], tables.1: s32[4]) -> bf16[8,128] {
  %constant.1 = s32[] constant(0), backend_config={}
  %q.1 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="q"}
  %tables.1 = s32[4]{0:T(128)} parameter(1), metadata={op_name="tables"}
  %fusion.1 = (s32[4]{0}, s32[4]{0}) fusion(%tables.1, %constant.1), calls=%fused_computation, \
backend_config={"estimated_cycles":"100"}
  %copy.1 = bf16[8,128]{1,0} copy(%q.1), backend_config={"estimated_cycles":"30"}
  %sort.1 = s32[4]{0} sort(%fusion.1), control-predecessors={%copy.1}, backend_config={"estimated_cycles":"7"}
  %sort.2 = s32[4]{0} sort(%sort.1), backend_config={"estimated_cycles":"9223372036854775807"}
  %attend.1 = bf16[8,128]{1,0} custom-call(%sort.1, %copy.1), custom_call_target="tpu_custom_call", backend_config={}
  ROOT %negate.1 = bf16[8,128]{1,0} negate(%attend.1), backend_config={"estimated_cycles":"2"}
}
"""


def test_what_follows_from_the_batch_alone_is_counted_apart() -> None:
    assert count_other_cycles(HLO, {1}) == (32, 107)
    assert count_other_cycles(HLO, set()) == (139, 0)
    assert count_other_cycles(HLO, {0, 1}) == (0, 139)


def test_kernel_calls_are_found_by_name() -> None:
    assert list(find_kernel_calls(HLO)) == ["attend.1"]
